"""A `DraftHost` as a proposer on the stepping thread sees it.

The proposer drafts between the result of a step and the choice of the next one's draft tokens. With
`--async-scheduling` it also launches drafts behind a step, with which the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.draft_port import (
    DeviceDrafts,
    GrownText,
    PostedBlock,
    ThreadHiddenStates,
    VerifyOutput,
)
from outrider.params import TokenIds
from outrider.rounds import BlockFate
from outrider.vllm.hosted_row import HostedRow

Arrived = Callable[[HostedRow, PostedBlock, BlockFate], None]


class HostedEngine:
    """Implements `ColocatedEngine`. Drafts come to the host, though the device may have them."""

    def __init__(self, rows: Mapping[int, HostedRow], arrived: Arrived) -> None:
        """Take the host's rows by session, and what counts a block that came for one."""
        self._rows = rows
        self._arrived = arrived
        self.features: ThreadHiddenStates | None = None
        self.grown_texts: Sequence[GrownText] = ()
        self.verify_output: VerifyOutput | None = None
        self.placed = False
        """The running step has the drafts that were launched behind the one before."""

    def grew(self, rows: Iterable[HostedRow]) -> None:
        """Note the rows that a step emitted tokens for, until `heard`."""
        self.grown_texts = [
            (row.session_id, row.token_ids, asked, row.ended)
            for row in rows
            if (asked := row.drafting.num_draft_tokens) or row.ended
        ]

    def heard(self) -> None:
        """Forget the texts that grew."""
        self.grown_texts = ()

    def asks(self, session_id: int) -> bool:
        row = self._rows.get(session_id)
        return row is not None and not row.ended and row.drafting.num_draft_tokens > 0

    def committed(self, session_id: int) -> TokenIds | None:
        row = self._rows.get(session_id)
        return None if row is None else tuple(row.token_ids)

    def post_block(self, block: PostedBlock) -> bool:
        """Take a draft; False if the session has ended."""
        row = self._rows.get(block.session_id)
        if row is None or row.ended:
            return False
        if block.proposer_id == row.drafting.offered.proposer.proposer_id:
            self._arrived(row, block, row.take_block(block.tree, block.method))
        return True

    def schedule_with_device_drafts(self, drafts: DeviceDrafts) -> bool:  # noqa: ARG002
        return self.placed

    def count_drafting(self, seconds: float) -> None: ...
