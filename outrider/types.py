"""Frozen values that cross the boundaries between services, engine and proposers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.counts import StepCounts
from outrider.errors import InvalidRequestError, PromptTooLongError
from outrider.features import FeatureBatch, FeatureSpec
from outrider.params import (
    MAX_TOP_LOGPROBS,
    Constraint,
    SamplingParams,
    SpeculationParams,
    StopParams,
    TokenIds,
    VerificationRule,
    require,
)


@dataclass(frozen=True, slots=True)
class Request:
    """One decoding request as the engine takes it. Raises `InvalidRequestError`."""

    session_id: int  # unique in the scorer's lifetime; the Draft stream's `session`
    prompt_token_ids: TokenIds
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    running_stats: bool = False  # stats with every Commit, not only the last
    constraint: Constraint | None = None
    top_logprobs: int | None = None  # likeliest tokens to tell with each token's; None: no logprobs
    num_resumed_tokens: int = 0  # the prompt's last tokens that are output of an earlier run
    tenant: str = ""
    stream_interval: int = 0  # tokens that the client is sent at a time, but for the first

    def __post_init__(self) -> None:
        require(len(self.prompt_token_ids) > 0, "prompt", "at least one token long")
        require(
            0 <= self.num_resumed_tokens < len(self.prompt_token_ids),
            "num_resumed_tokens",
            "less than the prompt's length",
        )
        if self.top_logprobs is not None:
            require(
                0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
                "top_logprobs",
                f"between 0 and {MAX_TOP_LOGPROBS}",
            )


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"


class TokenKind(enum.Enum):
    """Where an output token came from; see the proto enum of the same name."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


class MethodCounts(NamedTuple):
    """What one drafting method contributed to a request."""

    method: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What happened to one request in the engine; becomes `AuxInfo`. Times in milliseconds."""

    prompt_tokens: int
    output_tokens: int
    iter_count: int
    rounds: int
    drafted: int
    accepted: int
    accepted_per_pos: tuple[int, ...]
    k_histogram: tuple[int, ...]
    hits: int
    misses_late: int
    misses_wrong: int
    waits: int
    wait_ms: float
    fallback_rounds: int
    queue_ms: float
    prefill_ms: float
    propose_ms: float
    score_ms: float
    network_ms: float
    cached_prompt_tokens: int
    proposer_ids: tuple[str, ...]
    preemptions: int
    # Rounds for which a draft was wanted, by whether the one before was a hit; hits among them.
    rounds_after_hit: int = 0
    hits_after_hit: int = 0
    rounds_after_miss: int = 0
    hits_after_miss: int = 0
    by_method: tuple[MethodCounts, ...] = ()
    verification: VerificationRule = VerificationRule.COUPLED


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities at one output token."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the likeliest, in falling order


class Commit(NamedTuple):  # one per row and step: a frozen dataclass takes three times as long
    """What one engine step made true for one session.

    `token_ids` is trimmed at a stop: it is empty only when the stop token came first.
    `base_len` counts committed tokens (prompt included) before `token_ids`.
    `num_draft_tokens` is what the policy wants drafted for the next round.
    """

    session_id: int
    base_len: int
    token_ids: TokenIds
    kinds: tuple[TokenKind, ...]
    num_draft_tokens: int
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None  # with finish_reason, or always if the request asks
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if the request asks


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the engine could not go on with."""

    session_id: int
    error: Exception


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where one engine step's time went, milliseconds, and how large it was."""

    schedule_ms: float
    forward_ms: float
    verify_ms: float
    commit_ms: float
    idle_ms: float  # since the previous step was committed: waiting for drafts or work
    num_rows: int
    num_tokens: int
    gap_ms: float | None = None
    """Host time from the previous step's result to this one's launch, in which the device has no
    work; None if the step did not follow directly: it waited for drafts or work."""
    draft_ms: float = 0.0
    """Before this step, for drafts on the engine's own thread; no part of the others."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All that one engine step brought about; one message to the RPC side per step."""

    commits: tuple[Commit, ...]
    failures: tuple[Failure, ...]
    timings: StepTimings | None  # None: no forward was completed
    set_aside: tuple[int, ...] = ()
    """Sessions whose proposer missed several deadlines in a row and is not waited for any more,
    for a while. Its blocks are still welcome: the next useful one brings it back."""
    counts: StepCounts | None = None  # with timings
    on_demand: bool = False  # with timings: proposers that can run ahead are not to
    features: FeatureBatch | None = None  # hidden states for proposers that asked


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves and its limits; constant once it has started."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_waiting: int
    num_speculative_tokens: int
    features: FeatureSpec | None = None  # hidden states that are captured

    def check(self, request: Request) -> None:
        """Raise unless the request can be served at all.

        `InvalidRequestError` for a token outside the vocabulary; `PromptTooLongError` for a
        prompt that leaves no room for a token.
        """
        prompt = request.prompt_token_ids
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise InvalidRequestError(f"Token ids must be below {self.vocab_size}.", param="prompt")
        if any(token >= self.vocab_size for token, _ in request.sampling.logit_bias):
            raise InvalidRequestError(
                f"logit_bias names a token that is not below {self.vocab_size}.", param="logit_bias"
            )
        advice = request.speculation.advice
        known = (advice.token_ids, *advice.references)
        if any(max(token_ids, default=0) >= self.vocab_size for token_ids in known):
            raise InvalidRequestError(
                f"advice holds a token that is not below {self.vocab_size}.", param="advice"
            )
        if len(prompt) >= self.max_model_len:
            raise PromptTooLongError(
                f"The prompt has {len(prompt)} tokens; at most {self.max_model_len - 1} fit beside "
                f"one generated token in this model's context of {self.max_model_len}.",
                param="prompt",
            )


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """How full an engine is, as of its last step."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    undrafted_sizes: frozenset[int] = frozenset()
    """Where nothing is drafted at present: numbers of rows, by their bit length."""


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences."""
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return min(len(a), len(b))
