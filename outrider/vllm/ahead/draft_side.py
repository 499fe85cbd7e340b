"""What steps that are scheduled ahead ask of the side that drafts for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from outrider.vllm.adapter import StepOutput, StepPlan
from outrider.vllm.ahead.branch_table import BranchTable
from outrider.vllm.ahead.placed_drafts import PlacedDrafts

Known = Callable[[], bool]


class DraftSide(Protocol):
    """Decides on drafts, and follows the steps.

    Only `agreed`, `share` and `next_drafts` may raise: if ranks cannot reach each other, vLLM ends.
    """

    def awaited(self) -> None:
        """Take in what came while the last step ran."""

    def agreed(self, value: int) -> int:
        """Return rank 0's value on every rank, all of which call this in the same order."""
        ...

    def share(self, tokens: Tensor) -> None:
        """Overwrite tokens with rank 0's on every rank's device: the same shape on all."""

    def begin_prompts(self, names: Iterable[str]) -> None:
        """Begin to copy hidden states of rows whose prompts end in the last step.

        `names` are all rows of the next one.
        """

    def drafts_behind(self, rooms: Mapping[str, int]) -> PlacedDrafts | None:
        """Return the drafts that the device makes behind the running step, if they serve the next.

        `rooms` are the rows of the next step, each with its room for draft tokens.
        """
        ...

    def write_branches(self, places: Mapping[str, int], table: BranchTable) -> bool:
        """Write rows' drafts by how the running step may end; False if there can be none.

        `places` in the table are of the rows that have room for draft tokens.
        """
        ...

    def await_branches(self, table: BranchTable, known: Known) -> bool:
        """Write what comes; return True once no missing draft is worth waiting for.

        False if `known` says first that the host can read how the step ended, or if all missing
        drafts are made on demand: these come after it.
        """
        ...

    def add_branches(self, table: BranchTable, known: Known) -> None:
        """Write what else comes until it is `known` how the step ended."""

    def commit(self, output: StepOutput) -> None:
        """Commit what a step emitted, after which the device has chosen the next drafts."""

    def chosen(self, lengths: dict[str, int]) -> None:
        """Note how many draft tokens the device has chosen for each row."""

    def next_drafts(self, output: StepOutput | None, names: Sequence[str]) -> list[list[int]]:
        """Commit what a step emitted, and return drafts for rows of the next one that have room."""
        ...

    def begin(self, plan: StepPlan, began: float | None = None) -> None:
        """Note a step while it runs, and when it began."""

    def launched(self) -> None:
        """Keep the books of the step before, while one runs."""

    def sampled(
        self, names: Sequence[str], emitting: Collection[int], tokens: Callable[[], Tensor]
    ) -> None:
        """Launch what follows on the device from what a step emits.

        `names` are its rows; those at the `emitting` places emit `tokens`, int [rows, 1 + width]:
        drafts accepted, and then the target's choices.
        """

    def undrafted(self, names: Sequence[str]) -> frozenset[str]:
        """Return the rows that need no room for draft tokens in steps to come."""
        ...
