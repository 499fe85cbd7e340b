"""A request of vLLM as the draft side follows it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafted_nodes import NO_NODES, DraftNodes
from outrider.params import VerificationRule
from outrider.policy.row import Drafting
from outrider.rows.drafted_row import DraftedRow
from outrider.types import Request


class HostedRow(DraftedRow):
    """A request of vLLM. Only the stepping thread writes it."""

    def __init__(
        self,
        name: str,
        request: Request,
        drafting: Drafting,
        *,
        max_len: int,
        stop_ids: frozenset[int],
        started_at: float,
    ) -> None:
        super().__init__(request, max_len=max_len, stop_ids=stop_ids, drafting=drafting)
        self.name = name
        self.coupled = request.verification_rule is VerificationRule.COUPLED
        self.started_at = started_at
        self.num_drafted = 0  # tokens of the draft that was chosen for the next step
        self.num_verified = 0  # of them in the step that runs
        self.noted = True  # the tracker knows its last round
        self.ended = False
        self.stale = False  # the text may not be vLLM's
        # Where its hidden states are, as `PagedRow` says:
        self.num_computed = 0
        self.block_table: Sequence[int] = ()

    @property
    def room(self) -> int:
        """Return how many tokens may be drafted; the last one of a text needs no draft."""
        return self.max_len - len(self.token_ids) - 1

    @property
    def nodes(self) -> DraftNodes:
        """The chosen draft tokens; without confidences under rules that look at them."""
        if self.draft is None or not self.coupled:
            return NO_NODES
        return DraftNodes(self.draft.first_confidences(self.num_drafted, self.draft_node))
