"""SuffixDecoding's settings, without NumPy, so that a command line is read before its import."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """SuffixDecoding's settings, with vLLM's names and defaults. Raises `ConfigError`."""

    max_tree_depth: int = 24
    """Tokens of context that are matched at most."""
    max_spec_factor: float = 1.0
    """Draft tokens per token of context that matches."""
    min_token_prob: float = 0.1
    """Drafts end where the product of the estimated probabilities falls below it."""
    max_cached_requests: int = 10_000
    """Earlier responses to copy from; 0: none."""
    max_cached_tokens: int = 1_000_000
    """Their tokens, of all tenants together; the oldest responses go first."""
    shared_across_tenants: bool = False
    """Drafts, and so speed, may reveal one tenant's responses to another."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_tree_depth <= 1024:
            raise ConfigError("suffix_decoding_max_tree_depth must be between 1 and 1024.")
        if not 0.0 < self.max_spec_factor <= 100.0:
            raise ConfigError("suffix_decoding_max_spec_factor must be above 0 and at most 100.")
        if not 0.0 <= self.min_token_prob <= 1.0:
            raise ConfigError("suffix_decoding_min_token_prob must be between 0 and 1.")
        if self.max_cached_requests < 0 or self.max_cached_tokens < 0:
            raise ConfigError("suffix_decoding_max_cached_* must not be negative.")
