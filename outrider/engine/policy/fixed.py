"""K draft tokens in every round, to compare drafts; with K = 0 none."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.engine.policy.base import Measurements, Ready, StepDone
from outrider.engine.policy.draft_mode import ALL_SIZES, DraftMode
from outrider.engine.policy.row import Drafting
from outrider.engine.sequence import Sequence


class FixedPolicy:
    """Every round drafts as much as it may, and each row waits `max_wait_s` for its draft."""

    def __init__(self, num_speculative_tokens: int, *, max_wait_s: float = 0.02) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_wait_s = max_wait_s
        self.measured = Measurements()

    @property
    def mode(self) -> DraftMode:
        return DraftMode.AHEAD if self.num_speculative_tokens else DraftMode.OFF

    @property
    def may_wait(self) -> bool:
        return self.num_speculative_tokens > 0

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        return frozenset() if self.num_speculative_tokens else ALL_SIZES

    def choose_k(self, d: Drafting, limit: int) -> int:  # noqa: ARG002
        return limit

    def patience_s(self, seq: Sequence) -> float:  # noqa: ARG002
        return self.max_wait_s

    def choose_rows(
        self, ready: list[Sequence], waiting: Rows[Sequence], num_prefilling: int, now: float
    ) -> Ready:
        if ready or num_prefilling or not waiting:
            return Ready(ready, now)
        return Ready([], min([seq.drafting.round.deadline for seq in waiting]))

    def step_done(self, step: StepDone) -> None:
        pass
