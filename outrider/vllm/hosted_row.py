"""A request of vLLM as the draft side follows it."""

from __future__ import annotations

from collections.abc import Collection

from outrider.params import TokenIds
from outrider.policy.drafted_row import DraftedRow
from outrider.policy.row import Drafting
from outrider.types import FinishReason, Request


class HostedRow(DraftedRow):
    """A request of vLLM. Only the stepping thread writes it."""

    def __init__(
        self,
        name: str,
        request: Request,
        drafting: Drafting,
        *,
        max_len: int,
        stop_ids: Collection[int | None],
        started_at: float,
    ) -> None:
        super().__init__(request, max_len=max_len, drafting=drafting)
        self.name = name
        self.stop_ids = frozenset(stop_ids)
        self.started_at = started_at
        self.num_verified = 0  # draft tokens in the step that runs
        self.ended = False
        self.stale = False  # the text may not be vLLM's

    def trim(self, tokens: TokenIds) -> tuple[TokenIds, FinishReason]:
        """Return what is output of a request's last tokens, and why it ends."""
        for i, token in enumerate(tokens):
            if token in self.stop_ids:
                return tokens[:i], FinishReason.STOP
        return tokens[: self.max_len - len(self.token_ids)], FinishReason.LENGTH
