"""SuffixDecoding's settings, without NumPy, so that a command line is read before its import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.settings import setting


def _setting(default: Any, flag: str, about: str) -> Any:
    return setting(default, f"suffix: {about}", flag=flag)


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """SuffixDecoding's settings, with vLLM's names and defaults. Raises `ConfigError`."""

    max_tree_depth: int = _setting(
        24, "suffix_decoding_max_tree_depth", "tokens of context that are matched at most"
    )
    max_spec_factor: float = _setting(
        1.0, "suffix_decoding_max_spec_factor", "draft tokens per token of context that matches"
    )
    min_token_prob: float = _setting(
        0.1,
        "suffix_decoding_min_token_prob",
        "least estimated probability of a draft's tokens, multiplied",
    )
    max_cached_requests: int = _setting(
        10_000, "suffix_decoding_max_cached_requests", "earlier responses to draft from; 0: none"
    )
    max_cached_tokens: int = _setting(
        1_000_000, "suffix_decoding_max_cached_tokens", "their tokens, all tenants together"
    )
    shared_across_tenants: bool = _setting(
        False,
        "shared_memory_across_tenants",
        "draft from responses to other tenants, too, which drafts and their speed may then reveal",
    )

    def __post_init__(self) -> None:
        if not 1 <= self.max_tree_depth <= 1024:
            raise ConfigError("--suffix-decoding-max-tree-depth must be between 1 and 1024.")
        if not 0.0 < self.max_spec_factor <= 100.0:
            raise ConfigError("--suffix-decoding-max-spec-factor must be above 0 and at most 100.")
        if not 0.0 <= self.min_token_prob <= 1.0:
            raise ConfigError("--suffix-decoding-min-token-prob must be between 0 and 1.")
        for name in ("requests", "tokens"):
            if getattr(self, f"max_cached_{name}") < 0:
                raise ConfigError(f"--suffix-decoding-max-cached-{name} must not be negative.")
