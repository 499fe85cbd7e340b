"""Configuration shared by services. Frozen; "auto" is resolved before one is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from outrider.errors import ConfigError

DTYPES: Final = ("float32", "bfloat16", "float16")
"""Dtypes that a target may be served in."""

QUANTIZATIONS: Final = ("int8", "fp8")
"""Dtypes to which the weights of a target's linear layers may be rounded on load."""

KV_CACHE_DTYPES: Final = ("auto", "fp8")
"""Dtypes of keys and values: the model's, or float8 (e4m3) with a scale for each token and head."""

SPECULATION_POLICIES: Final = ("adaptive", "fixed", "off")
"""Draft as many tokens as are measured to be the fastest, K in every round, or none."""
THREAD_SWITCH_S: Final = 0.0005
"""Time for which a thread may keep the one that waits for its result from taking it up."""
HAND_OVER_S: Final = 50e-6
"""Sleep in which the event loop takes up the interpreter and tells proposers of a step. Else it
waits for a switch of threads, while the thread that runs steps goes on."""
NUM_SPECULATIVE_TOKENS: Final = 4
"""K, unless another is asked for."""
MAX_WAITING: Final = 1024
"""Requests that wait for a row of the batch."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Raises `ConfigError` for values that cannot work."""

    page_size: int = 16
    """Tokens per KV-cache page."""
    num_pages: int = 1024
    """Pages in the KV pool."""
    max_num_seqs: int = 128
    """Maximum rows of a step."""
    max_num_batched_tokens: int = 512
    """Maximum query tokens of a step: known tokens plus drafts."""
    max_model_len: int = 2048
    """Committed tokens a request can reach."""
    max_waiting: int = MAX_WAITING
    """Maximum requests that wait for admission; others get a CapacityError."""
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS
    """K: maximum draft tokens per row and step, unless a request asks otherwise."""
    enable_prefix_caching: bool = True
    synthetic_acceptance_rates: tuple[float, ...] = ()
    """For benchmarks: how likely a round accepts at least 1, 2, ... K tokens, whatever they are.
    Texts are not the target's. Empty: tokens are verified."""
    max_prompt_logits: int = 512
    """Maximum prompt tokens of a step that are scored, since each needs a row of logits."""

    def __post_init__(self) -> None:
        limits = ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens")
        for name in (*limits, "max_prompt_logits"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.")
        check_acceptance_rates(self.synthetic_acceptance_rates, self.num_speculative_tokens)
        if self.num_pages * self.page_size < self.max_model_len:
            raise ConfigError(
                f"{self.num_pages} pages of {self.page_size} tokens cannot hold one request of "
                f"{self.max_model_len} tokens: raise num_pages or lower max_model_len."
            )


def acceptance_rates(
    rates: Sequence[float], length: float | None, num_speculative_tokens: int
) -> tuple[float, ...]:
    """Return synthetic rates for K draft tokens: those given, or those of a mean `length`.

    `length` is of a round's tokens, the target's own included. As in vLLM its rounds vary as little
    as they can. Raises `ConfigError`.
    """
    if length is None:
        check_acceptance_rates(rates, num_speculative_tokens)
        return tuple(rates)
    if rates:
        raise ConfigError(
            "--synthetic-acceptance-rates and --synthetic-acceptance-length say the same: give one."
        )
    if not 1.0 <= length <= num_speculative_tokens + 1:
        raise ConfigError(
            f"--synthetic-acceptance-length {length:g} must lie between 1 and "
            f"{num_speculative_tokens + 1}: {num_speculative_tokens} draft tokens "
            "(--num-speculative-tokens) and the target's own."
        )
    return tuple(min(1.0, max(0.0, length - 1 - n)) for n in range(num_speculative_tokens))


def check_acceptance_rates(rates: Sequence[float], num_speculative_tokens: int) -> None:
    """Raise `ConfigError` for synthetic acceptance rates that no K draft tokens can have."""
    if not rates:
        return
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError("--synthetic-acceptance-rates must lie between 0 and 1.")
    if any(after > before for before, after in pairwise(rates)):
        raise ConfigError(
            "--synthetic-acceptance-rates must not rise: the n-th is how likely a round accepts at "
            "least n tokens."
        )
    if len(rates) != num_speculative_tokens:
        raise ConfigError(
            f"--synthetic-acceptance-rates has {len(rates)} rates, but needs one rate for each of "
            f"{num_speculative_tokens} draft tokens (--num-speculative-tokens)."
        )
