"""What a scorer is told once, at start. Frozen; every "auto" is resolved before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What this scorer serves, as clients and proposers are told."""

    scorer_id: str
    model: str
    served_model_name: str
    tokenizer_hash: str
    """Hex SHA-256; empty if the model's folder holds no tokenizer: proposers' is not compared."""
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: frozenset[int]
    num_speculative_tokens: int
    """K where a request names none."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds on what proposers may ask of this scorer."""

    hello_timeout_s: float = 10.0
    max_proposers: int = 64
    max_block_tokens: int = 512
    """Nodes in a block at most."""
    max_bad_blocks: int = 8
    """Malformed messages of one stream until it is ended with BAD_BLOCKS."""
    max_reopens: int = 3
    """Lost messages of one session and proposer until the session is drafted for elsewhere."""
    max_backlog_tokens: int = 1 << 20
    """Tokens and messages waiting for one proposer to read them; beyond, it is detached."""
    set_aside_s: float = 2.0
    """How long other proposers are preferred to one that kept missing deadlines."""
