"""The drafting state of one row: its proposer, its current round, and how its drafts fare."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.draft_port import NO_DRAFTS, DraftOffer
from outrider.engine.policy.acceptance import RowAcceptance
from outrider.engine.policy.circuit_breaker import CircuitBreaker
from outrider.engine.rounds import Round


class PastCommit(NamedTuple):
    """A commit that a block may answer."""

    length: int  # tokens after it; a block's base_len names it
    at: float
    awaited: bool  # no draft was left


@dataclass(slots=True)
class CurrentRound:
    """A row's way from its last commit into its next step."""

    committed_at: float = 0.0
    looked_at: float | None = None  # when the scheduler considered the row first
    at_hand: bool = False  # a draft was there at that moment
    deadline: float = 0.0  # the row waits no longer than this
    wrong: bool = False  # a guess for this round did not lie on the committed path


@dataclass(slots=True)
class HitRate:
    """Moving averages over the rounds that wanted a draft."""

    last: bool | None = None  # whether the last one had its draft at once
    share: float = 0.0  # of rounds that had, and whose draft cost the step nothing
    wait_s: float = 0.0  # mean wait of a round


@dataclass(slots=True)
class Drafting:
    """What is known of one row's drafts. Only the `DraftTracker` and the policy change it."""

    limit: int  # K at most, as the request and the configuration allow
    sampled: bool = False  # its temperature makes drafts meet clearly less
    proposer: DraftOffer = NO_DRAFTS
    drafter: str = ""  # the proposer with its method that drafted last: what takes its own time
    runs_ahead: bool = False  # drafts are made ahead now
    num_draft_tokens: int = 0  # K of the next round
    asked: bool = False  # the proposer knows that the next round is to have a draft
    worth_waiting: bool = True  # the proposer has drafts often enough
    blocks: int = 0  # that came from the present proposer
    last_block_at: float = 0.0  # when the last of them came; before, when it got the row
    awaited_since: float = 0.0  # when the first of them could be used, if it had come
    no_guess_at: int = -1  # committed length for which the proposer said it has no guess
    waited_in_vain: tuple[float, float] = (0.0, 0.0)  # (start, end) of the last such wait
    unlearned: Round | None = None  # the last round, until the policy has learned from it
    commits: deque[PastCommit] = field(default_factory=lambda: deque(maxlen=8))
    round: CurrentRound = field(default_factory=CurrentRound)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    acceptance: RowAcceptance = field(default_factory=RowAcceptance)
    hits: HitRate = field(default_factory=HitRate)

    @property
    def proposer_id(self) -> str | None:
        return self.proposer.proposer_id

    @property
    def waits(self) -> bool:
        """Whether the row waits for drafts at all."""
        if self.proposer.proposer_id is None or self.breaker.is_open:
            return False
        return self.num_draft_tokens > 0 and self.worth_waiting
