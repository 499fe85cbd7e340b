"""Drafts of a proposer on vLLM's stepping thread: between two steps, or behind the running one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.draft_port import ColocatedProposer, DeviceDrafts, VerifyingRow, VerifyOutput
from outrider.rows.tracker import DraftTracker
from outrider.vllm.ahead.placed_drafts import PlacedDrafts
from outrider.vllm.colocated import HostedEngine
from outrider.vllm.hosted_row import HostedRow

if TYPE_CHECKING:
    from torch import Tensor


class WorkerDrafts:
    """Asks the proposer for drafts, and keeps what it launched behind the running step."""

    def __init__(
        self, proposer: ColocatedProposer, engine: HostedEngine, tracker: DraftTracker
    ) -> None:
        """Take a proposer, and the engine as it sees it."""
        self._proposer, self._engine, self._tracker = proposer, engine, tracker
        self._behind: DeviceDrafts | None = None

    def grew(self, rows: Sequence[HostedRow]) -> None:
        """Note rows that emitted tokens, of which the proposer hears before it drafts."""
        if not self._tracker.policy.drafting:
            for row in rows:
                self._tracker.withhold(row)
        self._engine.grew(rows)

    def draft(self, rows: Sequence[HostedRow], *, placed: bool = False) -> None:
        """Let the proposer draft for the next step. Rows without a draft then wait for none.

        With `placed`, the next step has drafts already, and these are for the one after it.
        """
        self._engine.placed = placed
        try:
            self._proposer.draft_between_steps(self._engine)
        finally:
            self._engine.placed = False
        self._engine.heard()
        own = [row for row in rows if row.drafting.proposer.colocated]
        self._tracker.draft_nothing([row for row in own if row.draft is None])

    def follow(self) -> None:
        """Let the proposer work while a step runs."""
        self._proposer.after_launch(self._engine)

    def forget(self) -> None:
        """Forget what was launched behind the step before."""
        self._behind = None

    def launch(self, rows: Sequence[VerifyingRow], tokens: Callable[[], Tensor]) -> None:
        """Let the proposer launch drafts behind the running step.

        `rows` are those of it to draft for, and `tokens` returns what all of its rows emit.
        """
        try:
            if rows:
                self._engine.verify_output = VerifyOutput(rows, tokens())
            self.follow()
        finally:
            self._engine.verify_output = None
        if rows:
            self._behind = self._proposer.launched_drafts

    def place(self, rooms: Mapping[str, int], rows: Mapping[str, HostedRow]) -> PlacedDrafts | None:
        """Return what was launched, for the rows of the next step; None if the host is to choose.

        `rooms` are these, each with its room for draft tokens, and `rows` all requests. A row of
        the proposer may have none: of one whose prompt has just ended it makes the first draft
        behind the next step. None, too, for trees, if a row of another proposer wants a draft, or
        if no row has one.
        """
        if (drafts := self._behind) is None or drafts.nodes.parents is not None:
            return None
        sources: list[int] = []
        lengths: list[int] = []
        for name, room in rooms.items():
            row = rows.get(name)
            place = -1 if row is None else drafts.places.get(row.session_id, -1)
            sources.append(place)
            lengths.append(min(room, drafts.lengths[row.session_id]) if row and place >= 0 else 0)
            if place >= 0 or row is None or row.drafting.proposer.colocated:
                continue
            if room and row.drafting.num_draft_tokens:
                return None
        if not any(lengths):
            return None
        return PlacedDrafts.gather(drafts.nodes.tokens, sources, lengths, [*rooms.values()])
