"""Rows' drafts for each way in which the running step may end, as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from outrider.vllm.ahead.branch_table import BranchTable
from outrider.vllm.hosted_row import HostedRow
from outrider.vllm.waiting import Lockstep

_GLANCE_S: Final = 1e-4  # between two looks at whether a step has ended


class Branches:
    """Writes to a table what rows have, and takes in messages meanwhile."""

    def __init__(
        self,
        policy: Lockstep,
        num_draft_tokens: int,
        take_messages: Callable[[float], list[HostedRow]],
    ) -> None:
        """Take a function that waits so long at most, and returns the rows that blocks came for."""
        self._policy, self._k = policy, num_draft_tokens
        self._take_messages = take_messages
        self._places: Mapping[HostedRow, int] = {}  # of rows in the table

    def write(self, places: Mapping[HostedRow, int], table: BranchTable) -> None:
        """Begin with what rows of the running step have."""
        self._places = places
        for row in places:
            self._write(row, table)

    def wait(self, table: BranchTable, known: Callable[[], bool], num_prefilling: int) -> bool:
        """Write what comes; return True once no missing draft is worth waiting for.

        False if `known` says first that the host can read how the running step ended, or if all
        missing drafts are made on demand: these come after it.
        """
        late = self._worth_waiting(table, num_prefilling)
        while any(row.drafting.runs_ahead for row in late):
            if changed := self._take_messages(_GLANCE_S):
                for row in changed:
                    self._write(row, table)
                late = self._worth_waiting(table, num_prefilling)
            if late and known():
                return False
        return not late  # drafts on demand come after the result

    def add(self, table: BranchTable, known: Callable[[], bool]) -> None:
        """Write what comes until it is `known` how the running step ended."""
        while not known():
            for row in self._take_messages(_GLANCE_S):
                self._write(row, table)

    def _worth_waiting(self, table: BranchTable, num_prefilling: int) -> list[HostedRow]:
        """Return rows without branches if these are worth waiting for when the step has ended."""
        late: list[HostedRow] = []
        others: list[HostedRow] = []
        for row, place in self._places.items():
            lacks = row.drafting.waits and not table.has_branches(place)
            (late if lacks else others).append(row)
        gains = late and self._policy.may_gain_by_waiting(late, others, num_prefilling)
        return late if gains else []

    def _write(self, row: HostedRow, table: BranchTable) -> None:
        draft, place = row.draft, self._places.get(row)
        if draft is None or place is None or row.stale:
            return
        most = min(row.drafting.num_draft_tokens, self._k)
        for emitted, node in draft.outcomes(row.num_verified, row.draft_node):
            if path := draft.first_path(min(most, row.room - emitted), node):
                table.write(place, emitted, draft.token_ids[node], path)
