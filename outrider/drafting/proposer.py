"""What every proposer method implements, and the bookkeeping that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from outrider.draft_tree import DraftTree
from outrider.errors import ConfigError
from outrider.features import FeatureSpec
from outrider.params import (
    NO_ADVICE,
    Advice,
    Constraint,
    SamplingParams,
    TokenIds,
    VerificationRule,
)

TREE_WIDTH: Final = 8
"""Of draft trees: children of a node that are looked at, nodes of a depth that may get some."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured times that drafting ahead is to be hidden behind; zeros before they are known."""

    step_s: float = 0.0  # the scorer's step
    network_s: float = 0.0  # the way to the scorer and back


NO_PACE: Final = Pace()

SessionKey = int
"""Names a session within one proposer process. Never used again after `close` or `forget`."""


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """What a method is and how much it can hold; becomes `Hello`."""

    method: str
    model: str  # empty for methods without one
    vocab_size: int  # 0 for methods that copy tokens
    max_sessions: int
    max_draft_tokens: int  # per round
    max_model_len: int  # sessions beyond it are followed, not drafted for
    runs_ahead: bool = False  # can draft past tokens that are not verified yet
    methods: tuple[str, ...] = ()  # of a proposer with several: all, `method` first
    features: FeatureSpec | None = None  # what it needs besides tokens; see `FeatureProposer`


@dataclass(frozen=True, slots=True)
class ProposerLimits:
    """Bounds of a method that runs a model. Raises `ConfigError` for bounds of nothing."""

    max_sessions: int = 256
    max_draft_tokens: int = 16
    max_model_len: int | None = None  # None: the model's own
    max_branches: int = 16  # per session, drafted ahead; 0: none
    prefill_budget: int = 256  # prompt tokens of one call, so that no long prompt delays others
    tree_width: int = TREE_WIDTH  # 1: chains

    def __post_init__(self) -> None:
        if min(self.max_sessions, self.max_draft_tokens, self.prefill_budget, self.tree_width) < 1:
            raise ConfigError(
                "max_sessions, max_draft_tokens, prefill_budget and tree_width are at least 1."
            )


DEFAULT_LIMITS: Final = ProposerLimits()


@dataclass(frozen=True, slots=True)
class SessionStart:
    """How a session begins. Fields with a default are hints: a method uses what it understands."""

    prefix: Sequence[int]  # committed
    sampling: SamplingParams
    num_draft_tokens: int
    max_len: int  # that the session can reach
    methods: tuple[str, ...] = ()  # of a proposer with several: those that may draft, in order
    advice: Advice = NO_ADVICE
    constraint: Constraint | None = None
    rule: VerificationRule = VerificationRule.COUPLED
    tenant: str = ""
    num_output_tokens: int = 0  # of the prefix: its last ones, what was generated before `open`
    once: bool = False  # nothing will be committed: the first draft is all that is wanted

    @property
    def prompt_len(self) -> int:
        """Tokens of the prefix that output follows."""
        return len(self.prefix) - self.num_output_tokens

    @property
    def samples(self) -> bool:
        """Drafts are drawn with noise of their own: rejection verifies them."""
        return self.rule is VerificationRule.REJECTION and not self.sampling.greedy


@dataclass(frozen=True, slots=True)
class DraftRound:
    """What one call of `Proposer.draft` brought about.

    A session that was asked for is in exactly one of the four. An empty tree says "nothing to
    guess": the scorer need not wait.
    """

    drafts: list[tuple[SessionKey, DraftTree]] = field(default_factory=list)
    at_hand: list[SessionKey] = field(default_factory=list)  # an earlier tree holds the draft
    unfinished: list[SessionKey] = field(default_factory=list)  # prompt too long for one call
    lost: list[SessionKey] = field(default_factory=list)  # also sessions that were not asked for
    trees: list[tuple[SessionKey, DraftTree]] = field(default_factory=list)
    """Beside that: drafts that the scorer has, with branches for the outcomes of verifying them."""
    methods: dict[SessionKey, int] = field(default_factory=dict)
    """Of a proposer with several, by place in `traits.methods`: which made a draft or tree."""
    forward_s: float = 0.0  # time inside the model


class Proposer(Protocol):
    """A drafting method. Used from one thread; no method raises for what a scorer may send."""

    @property
    def traits(self) -> ProposerTraits: ...

    @property
    def num_sessions(self) -> int: ...

    def open(self, session: SessionKey, start: SessionStart) -> None:
        """A session begins; without room for it, it is lost: the next `draft` says so."""
        ...

    def commit(
        self, session: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> None:
        """`tokens` are true at positions base_len, base_len + 1, ...

        Repeats and overlaps are harmless. A gap, or tokens that contradict earlier ones, lose the
        session: the next `draft` says so. An unknown session is ignored.
        """
        ...

    def close(self, session: SessionKey) -> None:
        """The session, known or not, is over."""
        ...

    def forget(self, session: SessionKey) -> None:
        """As `close`, but its text goes on: here, under another key, or elsewhere."""
        ...

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        """Guesses what follows each of `sessions`, in one batch; unknown ones are left out.

        It may do what `ahead` does for those whose draft is at hand, if that delays no other.
        """
        ...

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        """Guesses past the drafts of `sessions`, for the outcomes of their verification.

        Called while the scorer verifies and no message waits, and again, when its trees are on
        their way, until it returns none; sessions that have no draft are left out, and only `trees`
        of the result is filled. `pace` says how much time there is. With no sessions, of any
        method: there is time for whatever must not hold up a draft.
        """
        ...


class FeatureProposer(Proposer, Protocol):
    """A method whose `traits.features` asks for states of the target."""

    @property
    def projection(self) -> bytes:
        """The matrix of `traits.features.projection_sha256`; empty if there is none."""
        ...

    def features(self, session: SessionKey, start: int, rows: bytes | memoryview) -> None:
        """States of the committed positions start, start + 1, ...: bfloat16 [n, features.width].

        They come in order from position 0, each before or with the `commit` of the token that was
        drawn from it. Repeats and overlaps are harmless; a gap, or rows of another size, lose the
        session. An unknown session is ignored.
        """
        ...


class Follower:
    """The committed tokens of one session, moved by committed offset.

    `length` also counts the tokens of a session that is silent, of which nothing else is kept.
    `pushed` is what the scorer holds to go on from them: the latest tree, as far as it came true.
    `wanted` are the draft tokens worth making now. One less than what is left to commit: the
    target's own token after an accepted draft always comes for free.
    """

    __slots__ = (
        "length",
        "max_draft_tokens",
        "max_len",
        "max_model_len",
        "num_draft_tokens",
        "pushed",
        "sampling",
        "tokens",
        "vocab_size",
        "wanted",
    )

    def __init__(self, start: SessionStart, traits: ProposerTraits) -> None:
        self.tokens: list[int] = []
        self.length = 0
        self.pushed: DraftTree | None = None
        self.sampling = start.sampling
        self.max_model_len = traits.max_model_len
        self.max_len = min(start.max_len, traits.max_model_len)
        self.vocab_size = traits.vocab_size or 2**31
        self.max_draft_tokens = traits.max_draft_tokens
        self.num_draft_tokens = min(start.num_draft_tokens, traits.max_draft_tokens)
        self._append(start.prefix)

    def commit(
        self, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> Sequence[int] | None:
        """Append what is new in `tokens`, and returns it; None if they do not fit what is known.

        Nothing is new to a session that is silent, or falls silent with it.
        """
        self.num_draft_tokens = min(num_draft_tokens, self.max_draft_tokens)
        if self.silent:
            if base_len <= self.length:
                self.length = max(self.length, base_len + len(tokens))
            return ()
        overlap = len(self.tokens) - base_len
        if overlap < 0:
            return None
        if overlap:
            if self.tokens[base_len : base_len + len(tokens)] != list(tokens[:overlap]):
                return None
            tokens = tokens[overlap:]
        self._append(tokens)
        if self.silent:
            self.pushed = None
            return ()
        if self.pushed is not None:
            self.pushed = self.pushed.walk(tokens)
        return tokens

    @property
    def silent(self) -> bool:
        """Nothing is kept or drafted any more: too long, or tokens outside the vocabulary."""
        return self.max_len == 0

    @property
    def at_hand(self) -> TokenIds:
        """The draft that the scorer holds already; empty if it lacks some of what is wanted."""
        if self.pushed is None:
            return ()
        wanted = self.wanted
        path = self.pushed.first_path(wanted)
        return path if len(path) == wanted else ()

    def _append(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)
        too_long = self.length > self.max_model_len
        if too_long or (tokens and max(tokens) >= self.vocab_size):
            self.max_len = 0
            self.tokens.clear()
        else:
            self.tokens.extend(tokens)
        left = self.max_len - self.length - 1
        self.wanted = max(0, min(self.num_draft_tokens, left)) if self.tokens else 0
