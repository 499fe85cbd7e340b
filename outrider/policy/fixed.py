"""K draft tokens in every round, to compare drafts; with K = 0 none."""

from __future__ import annotations

from outrider.policy.base import Policy, Row


class FixedPolicy(Policy):
    """Every round drafts as much as it may, and each row waits `max_wait_s` for its draft.

    That is longer than a draft takes on a busy machine: what is compared is not to come late.
    """

    def __init__(self, num_speculative_tokens: int, *, max_wait_s: float = 1.0) -> None:
        super().__init__(num_speculative_tokens)
        self.max_wait_s = max_wait_s

    def patience_s(self, row: Row) -> float:  # noqa: ARG002
        return self.max_wait_s
