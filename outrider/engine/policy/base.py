"""What the scheduler asks of a policy: how many tokens to draft, and which rows run now."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from outrider.engine.policy.acceptance import Acceptance, DraftAvailability
from outrider.engine.policy.cost_model import CostModel
from outrider.engine.policy.draft_mode import DraftMode
from outrider.engine.policy.row import Drafting
from outrider.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Ready:
    """The rows that run now, of those that lack at most a draft."""

    rows: list[Sequence]
    wake_at: float  # when to ask again at the latest, if nothing runs


@dataclass(frozen=True, slots=True)
class StepDone:
    """What a step brought."""

    num_running: int  # all rows that are admitted
    num_rows: int  # of the step
    tokens: int  # committed
    at: float  # when it ended
    drafted: int  # rows that verified a draft
    comparable: bool  # a row goes on from the step before, and a proposer is there
    answered: int  # rows whose proposer has sent a block
    prompt_tokens: int = 0  # processed
    prompts_only: bool = False  # all rows that decode waited for drafts
    temperature: float = 0.0  # mean of all rows that are admitted
    proposer_ids: frozenset[str] = frozenset()  # of the step's rows
    may_run_ahead: bool = False  # one of them can


@dataclass(slots=True)
class Measurements:
    """What was measured of steps and drafts, whatever the policy makes of it."""

    costs: CostModel = field(default_factory=CostModel)
    acceptance: Acceptance = field(default_factory=Acceptance)
    availability: DraftAvailability = field(default_factory=DraftAvailability)


class Policy(Protocol):
    """Decides; what happens to rows is kept by the `DraftTracker`."""

    num_speculative_tokens: int
    measured: Measurements

    @property
    def mode(self) -> DraftMode:
        """How rows come to their drafts now; ahead only from proposers that can."""

    @property
    def may_wait(self) -> bool:
        """Whether any row is to wait for a draft now."""

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        """Numbers of rows at which nothing is drafted at present, by their bit length."""

    def choose_k(self, d: Drafting, limit: int) -> int:
        """Return the draft tokens of a row's next round, of a tree all nodes; at most `limit`."""

    def patience_s(self, seq: Sequence) -> float:
        """Return how long after its last commit a row waits for its draft at most."""

    def choose_rows(
        self, ready: list[Sequence], waiting: Rows[Sequence], num_prefilling: int, now: float
    ) -> Ready:
        """Return the rows that run now, of those `ready`, and of those `waiting` for drafts.

        `num_prefilling` rows run in any case.
        """

    def step_done(self, step: StepDone) -> None:
        """Learn from a step that ended."""
