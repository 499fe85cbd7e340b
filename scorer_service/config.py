"""What a scorer is told once, at start. Frozen; every "auto" is resolved before."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.features import FeatureSpec


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
    features: FeatureSpec | None = None
    """Hidden states that are captured: what proposers may ask for."""
    device: str = ""
    """What it computes on, as proposers name theirs; empty: several devices, or unknown."""


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
    full_s: float = 1.0
    """How long a proposer that had no room is given no more sessions than it has."""
    max_backlog_tokens: int = 1 << 20
    """Tokens and messages waiting for one proposer to read them; beyond, it is detached."""
    max_projection_bytes: int = 512 * 2**20
    max_projections: int = 4
    """Different ones that are kept on the device."""
    projection_timeout_s: float = 60.0
    """From Welcome until a projection that was asked for is complete."""
    set_aside_s: float = 2.0
    """How long other proposers are preferred to one that kept missing deadlines."""
