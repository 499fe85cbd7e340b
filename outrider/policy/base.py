"""The questions of an engine to a policy: how many tokens to draft, and which rows run now."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.draft_tree import DraftTree
from outrider.policy.measurements import Measurements
from outrider.policy.row import ConfidentDraft, Drafting
from outrider.rounds import Counters


class Row(Protocol):
    """A request that an engine decodes, as a policy sees it."""

    drafting: Drafting
    counters: Counters
    token_ids: list[int]  # committed
    draft: DraftTree | None  # at hand for the next step
    draft_base: int  # committed tokens that the last draft was made from


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class Ready(Generic[R]):
    """The rows that run now, of those that lack at most a draft."""

    rows: list[R]
    wake_at: float  # when to ask again at the latest, if nothing runs


@dataclass(frozen=True, slots=True)
class StepDone:
    """The outcome of a step."""

    num_running: int  # all rows that are admitted
    num_rows: int  # of the step
    tokens: int  # committed
    at: float  # when it ended
    drafted: int  # rows that verified a draft
    comparable: bool  # a row goes on from the step before, and a proposer is there
    answered: float = 0.0  # share of rows that may draft whose proposer has sent a block
    prompt_s: float = 0.0  # that prompts took beside the other rows
    temperature: float = 0.0  # mean of all rows that are admitted
    proposer_ids: frozenset[str] = frozenset()  # of the step's rows that may draft
    in_vain_s: float = 0.0  # of drafting on its device, of each late or wrong draft


class Policy:
    """Drafts as much as rows may in every round; each waits longer than a slow draft takes.

    A policy decides; what happens to rows is kept by the `DraftTracker`. Others replace methods.
    """

    def __init__(self, num_speculative_tokens: int, *, max_wait_s: float = 1.0) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_wait_s = max_wait_s  # of a row for its draft
        self.measured = Measurements()

    @property
    def drafting(self) -> bool:
        """True if rows are to have drafts now."""
        return self.num_speculative_tokens > 0

    @property
    def may_wait(self) -> bool:
        """True if rows may wait for drafts now."""
        return self.drafting

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        """Numbers of rows at which nothing is drafted at present, by their bit length."""
        return frozenset([size for size in range(1, 17) if not self.drafting_at(size)])

    def drafting_at(self, size: int) -> bool:  # noqa: ARG002
        """Return whether so many rows are to have drafts, by their bit length."""
        return self.drafting

    @property
    def stance(self) -> object:
        """Return what a choice of draft tokens follows from, besides what was measured."""
        return self.drafting, self.may_wait

    def choose_counts(self, rows: Rows[Drafting]) -> list[int]:
        """Return the draft tokens of each row's next round, of a tree all nodes.

        The rows are to go into one step. Each has at most `offered.max_draft_tokens`.
        """
        return [d.offered.max_draft_tokens for d in rows]

    def cut(self, drafts: Rows[ConfidentDraft], num_rows: int, num_others: int) -> list[bool]:  # noqa: ARG002
        """Return which nodes of `drafts`, one after the other, a step of `num_rows` rows verifies.

        No node without its parent. The step has `num_others` tokens besides these nodes.
        """
        return [True] * sum([len(nodes.confidences) for _, nodes in drafts])

    def patience_s(self, row: Row) -> float:  # noqa: ARG002
        """Return how long after its last commit a row waits for its draft at most."""
        return self.max_wait_s

    def choose_rows(
        self, ready: list[R], waiting: Rows[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        """Return which of these rows run now, beside the `num_prefilling` that do in any case."""
        if ready or num_prefilling or not waiting:
            return Ready(ready, now)
        return Ready([], min([row.drafting.round.deadline for row in waiting]))

    def step_done(self, step: StepDone) -> None:
        """Learn from a step that ended."""


FixedPolicy = Policy  # which decides nothing by measurements
