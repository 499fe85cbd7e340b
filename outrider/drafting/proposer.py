"""The protocol of drafting methods, and the committed tokens of a session that they follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

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
"""Children of a draft tree's node that are looked at, and nodes of a depth that may get some."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured times that drafting ahead is to be hidden behind; zeros before they are known."""

    step_s: float = 0.0  # the scorer's step
    network_s: float = 0.0  # the way to the scorer and back
    spent_s: float = 0.0  # since the last commits came
    host_s: float = 0.0  # of the proposer's host beside the loop, to choose and send branches


NO_PACE: Final = Pace()

SessionKey = int
"""A session within one proposer process. Never used again after `close` or `forget`."""


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """The name and the limits of a method; becomes `Hello`."""

    method: str
    model: str  # empty for methods without one
    vocab_size: int  # 0 for methods that copy tokens
    max_sessions: int
    max_draft_tokens: int  # per round
    max_model_len: int  # sessions beyond it are followed, not drafted for
    runs_ahead: bool = False  # can draft past tokens that are not verified yet
    methods: tuple[str, ...] = ()  # of a proposer with several: all, `method` first
    features: FeatureSpec | None = None  # needed besides tokens; see `FeatureProposer`


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
    """The start of a session. Fields with a default are hints that a method may ignore."""

    prefix: Sequence[int]  # committed
    sampling: SamplingParams
    num_draft_tokens: int
    max_len: int  # that the session can reach
    methods: tuple[str, ...] = ()  # of a proposer with several: those that may draft, in order
    advice: Advice = NO_ADVICE
    constraint: Constraint | None = None
    rule: VerificationRule = VerificationRule.COUPLED
    tenant: str = ""
    num_output_tokens: int = 0  # the last ones of the prefix, which were generated before `open`

    @property
    def prompt_len(self) -> int:
        """Tokens of the prefix before the output."""
        return len(self.prefix) - self.num_output_tokens

    @property
    def samples(self) -> bool:
        """Drafts are drawn with noise of their own, as the rule asks."""
        return self.rule.samples and not self.sampling.greedy


class LoopRun(NamedTuple):
    """A batch of drafts and branches that a model ran, with so many tokens for each row."""

    drafts: int  # rows
    branches: int  # rows
    captured: int  # rows that the model ran, padding included
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DraftRound:
    """The result of one call of `Proposer.draft`.

    A session that was asked for is in exactly one of the first four lists. An empty tree tells the
    scorer not to wait.
    """

    drafts: list[tuple[SessionKey, DraftTree]] = field(default_factory=list)
    at_hand: list[SessionKey] = field(default_factory=list)  # an earlier tree holds the draft
    unfinished: list[SessionKey] = field(default_factory=list)  # prompt too long for one call
    lost: list[SessionKey] = field(default_factory=list)  # also sessions that were not asked for
    trees: list[tuple[SessionKey, DraftTree]] = field(default_factory=list)
    """Drafts that the scorer has, with branches for the outcomes of verifying them."""
    methods: dict[SessionKey, int] = field(default_factory=dict)
    """The index in `traits.methods` of the method that made a draft or tree."""
    forward_s: float = 0.0  # time inside the model
    loops: list[LoopRun] = field(default_factory=list)  # of drafts with candidates


class Proposer(Protocol):
    """A drafting method. Used from one thread; nothing that a scorer may send raises."""

    traits: ProposerTraits

    @property
    def num_sessions(self) -> int: ...

    def open(self, session: SessionKey, start: SessionStart) -> None:
        """Begin a session; without room it is lost, which the next `draft` reports."""

    def commit(
        self, session: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> None:
        """Commit `tokens` at positions base_len, base_len + 1, ...

        Repeats and overlaps are harmless. A gap, or tokens that contradict earlier ones, lose the
        session, which the next `draft` reports. An unknown session is ignored.
        """

    def close(self, session: SessionKey) -> None:
        """End a session, known or not."""

    def forget(self, session: SessionKey) -> None:
        """End a session whose text goes on: here under another key, or elsewhere."""

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        """Guess the tokens after each of `sessions`, in one batch; unknown ones are left out.

        For sessions whose draft is at hand it may do the work of `ahead`, if that delays no other.
        """

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        """Guess past the drafts of `sessions`, for the outcomes of their verification.

        Called while the scorer verifies and no message waits, and again when its trees are on
        their way, until it returns none. Sessions without a draft are left out, and only `trees` of
        the result is filled. `pace` tells how much time there is. With no sessions, every method is
        called: there is time for work that must not hold up a draft.
        """


class FeatureProposer(Proposer, Protocol):
    """A method whose `traits.features` asks for hidden states of the target."""

    @property
    def projection(self) -> bytes:
        """The matrix of `traits.features.projection_sha256`; empty if there is none."""

    def features(self, session: SessionKey, start: int, rows: bytes | memoryview) -> None:
        """Take states of the positions start, start + 1, ...: bfloat16 [n, features.width].

        They come in order from position 0, each before or with the `commit` of the token that was
        drawn from it, but for those that `launch_after_verify` said it read. Repeats and overlaps
        are harmless. A gap, or rows of another size, lose the session. An unknown session, and one
        that gets no more drafts, is ignored.
        """


class Follower:
    """The committed tokens of one session, moved by committed offset.

    `length` also counts the tokens of a silent session, of which nothing else is kept. `wanted` is
    the number of draft tokens worth making now, at most one less than the tokens left to commit,
    since the target's own token after an accepted draft is free.
    """

    def __init__(self, start: SessionStart, traits: ProposerTraits) -> None:
        self.tokens: list[int] = []
        self.length = 0
        self._tree: DraftTree | None = None  # the scorer's latest, until a token falls off it
        self._node = -1  # its node that the text has reached
        self.sampling, self._rule = start.sampling, start.rule
        self.max_model_len = traits.max_model_len
        self.max_len = min(start.max_len, traits.max_model_len)
        self.silent = self.max_len == 0
        """Nothing is kept or drafted any more: too long, or tokens outside the vocabulary."""
        self.vocab_size = traits.vocab_size or 2**31
        self.max_draft_tokens = traits.max_draft_tokens
        self.num_draft_tokens = min(start.num_draft_tokens, traits.max_draft_tokens)
        self._append(start.prefix)

    @property
    def draft_sampling(self) -> SamplingParams:
        """Return the parameters that the next draft is drawn with."""
        if self._rule is not VerificationRule.BLOCK:
            return self.sampling
        return self.sampling.of_draft(self.length)

    def commit(
        self, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> Sequence[int] | None:
        """Append and return the new ones of `tokens`; None if they contradict known ones.

        Nothing is new to a session that is silent, or falls silent with them.
        """
        limit = self.max_draft_tokens  # min() would take longer, for each commit
        self.num_draft_tokens = num_draft_tokens if num_draft_tokens < limit else limit
        if self.silent:
            if base_len <= self.length:
                self.length = max(self.length, base_len + len(tokens))
            return ()
        if overlap := len(self.tokens) - base_len:
            if overlap < 0:
                return None
            if self.tokens[base_len : base_len + len(tokens)] != list(tokens[:overlap]):
                return None
            tokens = tokens[overlap:]
        self._append(tokens)
        if self.silent:
            self._tree = None
            return ()
        if self._tree is not None:
            node = self._tree.descend(tokens, self._node)
            if node is None:
                self._tree = None
            else:
                self._node = node
        return tokens

    @property
    def is_over(self) -> bool:
        """Nothing is drafted any more, whatever comes."""
        return self.max_len - self.length < 2

    def push(self, tree: DraftTree) -> None:
        """Note that the scorer is about to hold `tree`."""
        self._tree, self._node = tree, -1

    @property
    def pushed(self) -> DraftTree | None:
        """The scorer's latest tree, as far as it goes on after the text; None if it does not."""
        tree = self._tree
        if tree is None or self._node < 0:
            return tree
        size = len(tree.token_ids)
        return tree.below(self._node, size, size)._replace(base_len=self.length)

    def held(self, num_tokens: int) -> TokenIds:
        """Return the next tokens of the scorer's latest tree, at most so many."""
        return () if self._tree is None else self._tree.first_path(num_tokens, self._node)

    @property
    def at_hand(self) -> TokenIds:
        """The draft that the scorer holds already; empty if it is shorter than wanted."""
        path = self.held(self.wanted)
        return path if len(path) == self.wanted else ()

    def _append(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)
        if self.length > self.max_model_len or (tokens and max(tokens) >= self.vocab_size):
            self.max_len, self.silent = 0, True
            self.tokens.clear()
        else:
            self.tokens += tokens
        left, asked = self.max_len - self.length - 1, self.num_draft_tokens
        wanted = asked if asked < left else left
        self.wanted = wanted if wanted > 0 and self.tokens else 0
