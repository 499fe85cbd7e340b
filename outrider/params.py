"""Parameters of a request; `rpc.codec` builds them from the wire.

Every constructor raises `InvalidRequestError`, naming the field, for a value out of range.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from outrider.errors import InvalidRequestError

TokenIds = tuple[int, ...]

MAX_SPECULATIVE_TOKENS = 128
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18
"""Log probabilities of one prompt: its tokens, and the likeliest that are reported beside each."""
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_CONSTRAINT_CHARS = 2**18
MAX_REFERENCES = 16
MAX_ADVICE_TOKENS = 2**18  # with the references


def require(condition: bool, param: str, allowed: str) -> None:
    """Raise `InvalidRequestError` unless the condition holds: `param` must be `allowed`."""
    if not condition:
        raise InvalidRequestError(f"{param} must be {allowed}.", param=param)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of the target's next token; `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # uint64
    presence_penalty: float = 0.0  # once per token in the output
    frequency_penalty: float = 0.0  # per occurrence in the output
    repetition_penalty: float = 1.0  # for tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias), each token once

    def __post_init__(self) -> None:
        require(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2")
        require(0 <= self.top_k < 2**31, "top_k", f"between 0 (off) and {2**31 - 1}")
        require(0.0 < self.top_p <= 1.0, "top_p", "greater than 0 and at most 1")
        require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        require(0 <= self.seed < 2**64, "seed", "an unsigned 64-bit number")
        require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        require(
            0.0 < self.repetition_penalty <= 10.0,
            "repetition_penalty",
            "greater than 0 and at most 10",
        )
        tokens = {token for token, _ in self.logit_bias}
        require(
            len(tokens) == len(self.logit_bias) <= MAX_LOGIT_BIASES
            and all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias)
            and min(tokens, default=0) >= 0,
            "logit_bias",
            f"at most {MAX_LOGIT_BIASES} different tokens, each with a bias between -100 and 100",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def of_draft(self, base_len: int) -> SamplingParams:
        """Return these with the seed of one draft, after `base_len` tokens, and its verification.

        Block verification needs it: what becomes of a draft depends on draws behind the tokens
        that the draft adds.
        """
        return replace(self, seed=(self.seed + 0x9E3779B97F4A7C15 * base_len) % 2**64)

    @property
    def has_penalties(self) -> bool:
        """Tell whether earlier tokens change the logits of later ones."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclass(frozen=True, slots=True)
class StopParams:
    """The conditions that end a request. A stop token is not part of the output."""

    max_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0  # end-of-sequence and stop tokens are masked before

    def __post_init__(self) -> None:
        require(1 <= self.max_tokens < 2**31, "max_tokens", "at least 1")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} different tokens",
        )


class ConstraintKind(enum.Enum):
    """Languages that constraints are written in."""

    JSON_OBJECT = "json_object"  # any object; `source` is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # llguidance's Lark dialect


@dataclass(frozen=True, slots=True)
class Constraint:
    """A language that the output must belong to."""

    kind: ConstraintKind
    source: str = ""

    def __post_init__(self) -> None:
        needed = self.kind is not ConstraintKind.JSON_OBJECT
        require(bool(self.source) == needed, self.kind.value, "given, and not empty")
        require(
            len(self.source) <= MAX_CONSTRAINT_CHARS,
            self.kind.value,
            f"at most {MAX_CONSTRAINT_CHARS} characters long",
        )


class VerificationRule(enum.Enum):
    """A rule that accepts drafted tokens; common.proto describes each."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"
    TYPICAL = "typical"
    TOP_P_WINDOW = "top_p_window"
    SYNTHETIC = "synthetic"  # a scorer's own, for benchmarks; no request can ask for it

    @property
    def exact(self) -> bool:
        """Tell whether the output has the target's distribution."""
        return self is VerificationRule.COUPLED or self.samples

    @property
    def captured(self) -> bool:
        """Tell whether captured steps apply it."""
        return self in (VerificationRule.COUPLED, VerificationRule.SYNTHETIC)

    @property
    def samples(self) -> bool:
        """Tell whether drafts are drawn with noise of their own, and sent with distributions."""
        return self in (VerificationRule.REJECTION, VerificationRule.BLOCK)


REQUEST_RULES: Final = tuple(r for r in VerificationRule if r is not VerificationRule.SYNTHETIC)
"""Rules that requests may ask for."""


@dataclass(frozen=True, slots=True)
class Verification:
    """A rule and the settings of all rules; those of other rules are ignored."""

    rule: VerificationRule = VerificationRule.COUPLED
    epsilon: float = 0.09
    alpha: float = 0.3
    max_candidate_len: int = 5
    verify_window: int = 2
    required: bool = False  # coupled is asked for by name: rejection may not stand in for it
    rates: tuple[float, ...] = ()  # SYNTHETIC: see `EngineConfig.synthetic_acceptance_rates`

    def __post_init__(self) -> None:
        require(0.0 < self.epsilon <= 1.0, "epsilon", "greater than 0 and at most 1")
        require(0.0 < self.alpha <= 1.0, "alpha", "greater than 0 and at most 1")
        require(1 <= self.max_candidate_len <= 256, "max_candidate_len", "between 1 and 256")
        require(1 <= self.verify_window <= 128, "verify_window", "between 1 and 128")


@dataclass(frozen=True, slots=True)
class Advice:
    """Text that the output is likely to repeat, for methods that copy."""

    token_ids: TokenIds = ()  # the expected output
    edit: bool = False  # follow the text through insertions, deletions and replacements
    min_token_match: int = 2
    max_token_match: int = 2
    references: tuple[TokenIds, ...] = ()  # documents besides the prompt

    def __post_init__(self) -> None:
        require(1 <= self.min_token_match <= 64, "min_token_match", "between 1 and 64")
        require(
            self.min_token_match <= self.max_token_match <= 64,
            "max_token_match",
            "between min_token_match and 64",
        )


NO_ADVICE = Advice()


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Per-request control of speculation. Without methods the scorer chooses."""

    enabled: bool = True
    methods: tuple[str, ...] = ()  # the preferred one first
    num_speculative_tokens: int | None = None
    verification: Verification = Verification()
    advice: Advice = NO_ADVICE

    def __post_init__(self) -> None:
        require(len(set(self.methods)) == len(self.methods), "methods", "different from each other")
        if self.num_speculative_tokens is not None:
            require(
                0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS,
                "num_speculative_tokens",
                f"between 0 and {MAX_SPECULATIVE_TOKENS}",
            )
