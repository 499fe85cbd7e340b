"""The drafting state of one row: what it is offered, what it waits for, and what was measured."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.averages import Average
from outrider.draft_port import NO_DRAFTS, DraftOffer
from outrider.drafted_nodes import NO_NODES, DraftNodes
from outrider.policy.circuit_breaker import CircuitBreaker
from outrider.rounds import Round

SAMPLED_TEMPERATURE = 0.5  # from which drafts meet a text clearly less


@dataclass(frozen=True, slots=True)
class Offered:
    """The drafts that a row may have."""

    limit: int  # tokens at most, as the request and the configuration allow
    sampled: bool = False  # its temperature makes drafts meet clearly less
    proposer: DraftOffer = NO_DRAFTS
    draftable: bool = field(init=False)  # there is a proposer, and drafts are allowed

    def __post_init__(self) -> None:
        draftable = self.proposer.proposer_id is not None and self.limit > 0
        object.__setattr__(self, "draftable", draftable)

    @property
    def max_draft_tokens(self) -> int:
        return min(self.limit, self.proposer.max_draft_tokens)


class PastCommit(NamedTuple):
    """A commit that a block may answer."""

    length: int  # tokens after it; a block's base_len names it
    at: float
    measures: bool  # the time to its answer is that of one draft


@dataclass(slots=True)
class CurrentRound:
    """A row's way from its last commit into its next step."""

    committed_at: float = 0.0
    looked_at: float | None = None  # when the scheduler considered the row first
    at_hand: bool = False  # a draft was there at that moment
    deadline: float = 0.0  # the row waits no longer than this
    wrong: bool = False  # a guess for this round did not lie on the committed path
    nodes: DraftNodes = NO_NODES  # that it verifies, if the draft told confidences


@dataclass(slots=True)
class Awaited:
    """The draft that a row waits for."""

    asked: bool = False  # the proposer knows that the next round is to have a draft
    since: float = 0.0  # when the proposer's first block could be used, if it had come
    blocks: int = 0  # that came from the present proposer
    last_block_at: float = 0.0  # when the last of them came; before, when it got the row
    no_guess_at: int = -1  # committed length for which the proposer said it has no guess
    in_vain: tuple[float, float] = (0.0, 0.0)  # (start, end) of the last wait without a draft
    commits: deque[PastCommit] = field(default_factory=lambda: deque(maxlen=128))


@dataclass(slots=True)
class Measured:
    """The success of a row's drafts over its last rounds: texts change within sentences."""

    accepted: Average = field(default_factory=Average)  # share of the draft tokens that were tried
    levels: Average = field(default_factory=lambda: Average(mean=1.0))  # depth per token; chain: 1
    free_hits: Average = field(default_factory=lambda: Average(mean=0.0))  # share at no cost
    free_after_miss: Average = field(default_factory=lambda: Average(mean=0.0))  # after a miss
    hit: bool | None = None  # the last round that wanted a draft had it at once
    gain: float = 0.0  # tokens that the next draft is expected to bring
    worth_waiting: bool = True  # the proposer has drafts soon and often enough


@dataclass(slots=True)
class Drafting:
    """The state of one row's drafts. Only the `DraftTracker` and the policy change it."""

    offered: Offered
    num_draft_tokens: int = 0  # of the next round
    runs_ahead: bool = False  # drafts are made ahead now
    drafter: str = ""  # the proposer with its method that drafted last: what takes its own time
    unlearned: list[tuple[Round, DraftNodes]] = field(default_factory=list)  # rounds until then
    stance: object = None  # of the policy, when it chose the draft tokens; None: choose anew
    round: CurrentRound = field(default_factory=CurrentRound)
    awaited: Awaited = field(default_factory=Awaited)
    measured: Measured = field(default_factory=Measured)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    @property
    def proposer(self) -> DraftOffer:
        return self.offered.proposer

    @property
    def proposer_id(self) -> str | None:
        return self.offered.proposer.proposer_id

    @property
    def kind(self) -> tuple[str, bool]:
        """Return what like drafts share: their drafter, and whether the text is sampled."""
        return self.drafter, self.offered.sampled

    @property
    def waits(self) -> bool:
        """True if the row waits for drafts at all."""
        may_come = self.proposer_id is not None and not self.breaker.rounds_left
        return may_come and self.num_draft_tokens > 0 and self.measured.worth_waiting


ConfidentDraft = tuple[Drafting, DraftNodes]  # at hand, from a proposer that sent confidences
