"""Frozen values that cross the boundaries between services, engine and proposers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, NamedTuple

from outrider.counts import StepCounts
from outrider.errors import InvalidRequestError, PromptTooLongError
from outrider.features import FeatureBatch, FeatureSpec
from outrider.params import (
    MAX_PROMPT_LOGPROBS,
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
    top_logprobs: int | None = None  # likeliest tokens to report; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt's tokens but the first
    num_resumed_tokens: int = 0  # last tokens of the prompt that an earlier run generated
    tenant: str = ""
    stream_interval: int = 0  # tokens per message to the client, after the first
    adapter: str = ""  # of the model, by its name; empty: none
    draft_trees: bool = False  # each round's draft with its Commit

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
        if self.prompt_logprobs is not None:
            require(
                0 <= self.prompt_logprobs <= MAX_TOP_LOGPROBS
                and len(self.prompt_token_ids) * (1 + self.prompt_logprobs) <= MAX_PROMPT_LOGPROBS,
                "prompt_logprobs",
                f"between 0 and {MAX_TOP_LOGPROBS}, and at most {MAX_PROMPT_LOGPROBS} in total: "
                "the prompt's tokens times (1 + prompt_logprobs)",
            )

    @property
    def verification_rule(self) -> VerificationRule:
        """Return the rule in effect: without randomness all but synthetic are coupled."""
        rule = self.speculation.verification.rule
        if self.sampling.greedy and rule is not VerificationRule.SYNTHETIC:
            return VerificationRule.COUPLED
        return rule


class FinishReason(enum.Enum):
    """The reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"


class TokenKind(enum.Enum):
    """The origin of an output token; see the proto enum of the same name."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"

    __hash__ = object.__hash__  # members are looked up for every token, and Enum's is slow


class MethodCounts(NamedTuple):
    """Draft tokens that one method contributed to a request."""

    method: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The account of one request; becomes `AuxInfo`. Times in milliseconds."""

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
    # Rounds that wanted a draft, after a hit and after a miss, and the hits among them.
    rounds_after_hit: int = 0
    hits_after_hit: int = 0
    rounds_after_miss: int = 0
    hits_after_miss: int = 0
    by_method: tuple[MethodCounts, ...] = ()
    drafts_per_context: tuple[int, ...] = ()  # by `context_class`
    accepted_per_context: tuple[int, ...] = ()
    verification: VerificationRule = VerificationRule.COUPLED


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities at one output token."""

    logprob: float  # of the token
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the likeliest, in falling order


class PromptLogprobs(NamedTuple):
    """Logprobs of a prompt's n tokens but the first, with the `top` likeliest at each."""

    logprobs: list[float]  # [n - 1]
    top_token_ids: list[int]  # [(n - 1) * top], in falling order at each token
    top_logprobs: list[float]  # [(n - 1) * top]

    def tokens(self) -> tuple[TokenLogprobs, ...]:
        """Return them token by token."""
        top = len(self.top_token_ids) // max(1, len(self.logprobs))
        pairs = list(zip(self.top_token_ids, self.top_logprobs, strict=True))
        return tuple(
            TokenLogprobs(logprob, tuple(pairs[i * top : (i + 1) * top]))
            for i, logprob in enumerate(self.logprobs)
        )


class VerifiedDraft(NamedTuple):
    """The draft of a round, a tree after `base_len` tokens; without parents, a chain."""

    base_len: int
    token_ids: TokenIds
    parents: tuple[int, ...]  # of each node; -1: the root


class Commit(NamedTuple):  # one per row and step: a frozen dataclass takes three times as long
    """Tokens that an engine committed to one session in a step, or since the last such report."""

    session_id: int
    base_len: int  # committed tokens before these, with the prompt
    token_ids: TokenIds  # trimmed at a stop: empty only if the stop token came first
    kinds: tuple[TokenKind, ...]
    num_draft_tokens: int  # that the policy asks for in the next round
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None  # with finish_reason, or always if the request asks
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if the request asks
    stop_token_id: int | None = None  # that ended the request; it is no output
    prompt_logprobs: PromptLogprobs | None = None  # with the first, if the request asks
    draft: VerifiedDraft | None = None  # that was verified, if the request asks


PLAIN: Final = (TokenKind.PLAIN,)


class Grown(NamedTuple):
    """Sessions that got a plain token and no more, in columns, since most do in most steps."""

    session_ids: tuple[int, ...] = ()
    base_lens: tuple[int, ...] = ()  # as in a `Commit`
    token_ids: tuple[int, ...] = ()
    num_draft_tokens: tuple[int, ...] = ()  # as in a `Commit`

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Return the same as objects."""
        return tuple(
            [
                Commit(session_id, base_len, (token,), PLAIN, num_draft_tokens)
                for session_id, base_len, token, num_draft_tokens in zip(*self, strict=True)
            ]
        )

    def of(self, sessions: set[int]) -> Grown:
        """Return those of some sessions."""
        if sessions.issuperset(self.session_ids):
            return self
        return self.where([session_id in sessions for session_id in self.session_ids])

    def where(self, kept: Sequence[bool]) -> Grown:
        """Return those that are `kept`."""
        return Grown(*[tuple(compress(column, kept)) for column in self])


NONE_GROWN: Final = Grown()


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the engine had to end."""

    session_id: int
    error: Exception


@dataclass(frozen=True, slots=True)
class StepTimings:
    """The size of one engine step, and its time in milliseconds."""

    schedule_ms: float
    forward_ms: float
    verify_ms: float
    commit_ms: float
    idle_ms: float  # since the previous step was committed: waiting for drafts or work
    num_rows: int
    num_tokens: int
    gap_ms: float | None = None
    """From the previous step's result to this one's launch, while the device has no work; None if
    the step waited for drafts or work in between."""
    draft_ms: float = 0.0
    """Drafting on the engine's own thread before this step; not part of the other times."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The results of one engine step; one message to the RPC side per step."""

    told: tuple[Commit, ...]  # beside `grown`
    failures: tuple[Failure, ...]
    timings: StepTimings | None  # None: no forward was completed
    set_aside: tuple[int, ...] = ()
    """Sessions whose proposer missed several deadlines in a row, and is not waited for until its
    next useful block."""
    counts: StepCounts | None = None  # with timings
    features: FeatureBatch | None = None  # hidden states for proposers that asked
    grown: Grown = NONE_GROWN

    @property
    def commits(self) -> tuple[Commit, ...]:
        return self.grown.commits + self.told


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The constant limits of an engine."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_waiting: int
    num_speculative_tokens: int
    features: FeatureSpec | None = None  # hidden states that are captured
    adapters: tuple[str, ...] = ()  # names that requests may ask for
    synthetic: bool = False
    """Drafts are accepted at given rates, so that requests name no rule or constraint."""

    def check(self, request: Request) -> None:
        """Raise `InvalidRequestError` or `PromptTooLongError` if the request cannot be served."""
        prompt = request.prompt_token_ids
        if request.adapter and request.adapter not in self.adapters:
            raise InvalidRequestError(
                f"There is no adapter {request.adapter!r} here; start the scorer with --engine "
                f"vllm -- --enable-lora --lora-modules {request.adapter}=FOLDER.",
                param="model",
            )
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
        verification = request.speculation.verification
        named = verification.required or verification.rule is not VerificationRule.COUPLED
        if self.synthetic and named:
            raise InvalidRequestError(
                "This scorer accepts drafts at synthetic rates, for benchmarks: leave verification "
                "out, or start it without --synthetic-acceptance-rates.",
                param="verification",
            )
        if self.synthetic and request.constraint is not None:
            raise InvalidRequestError(
                "This scorer accepts drafts at synthetic rates, which is for benchmarks and takes "
                "no constraints: leave the constraint out, or start it without "
                "--synthetic-acceptance-rates.",
                param=request.constraint.kind.value,
            )
        if len(prompt) >= self.max_model_len:
            raise PromptTooLongError(
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt "
                f"has {len(prompt)}, which leaves no room for a generated one.",
                param="prompt",
            )


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The load of an engine after its last step."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    undrafted_sizes: frozenset[int] = frozenset()
    """Bit lengths of the numbers of rows at which nothing is drafted at present."""


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return min(len(a), len(b))
