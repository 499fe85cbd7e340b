"""The policy that measures, and maximises committed tokens per second.

What a draft costs the steps beside it is found by trials of draft modes (mode_selector.py). Within
a mode, how many tokens a row drafts (draft_length.py) and how long it waits for them (waiting.py)
follow from measured times and acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.engine.policy.base import Measurements, Ready, StepDone
from outrider.engine.policy.draft_length import DraftLength
from outrider.engine.policy.draft_mode import DraftMode
from outrider.engine.policy.microbatches import next_half
from outrider.engine.policy.mode_selector import ModeSelector
from outrider.engine.policy.row import Drafting
from outrider.engine.policy.waiting import Waiting
from outrider.engine.sequence import Sequence

TRIED_K = 16  # at most, or twice the present K: one round of 128 costs as much as several
TRY_EVERY, TRY_STEPS = 16, 4  # steps with few drafts after which all rows try, and for how long


class AdaptivePolicy:
    """Composes mode, draft length and waiting over one set of measurements."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.measured = Measurements()
        self._modes = ModeSelector()
        self._length = DraftLength(self.measured.costs, self.measured.acceptance)
        self._waiting = Waiting(self.measured, self._length)
        self._num_running = 1
        self._steps_with_few_drafts = 0

    @property
    def mode(self) -> DraftMode:
        return self._modes.mode

    @property
    def may_wait(self) -> bool:
        return self.mode.drafts and not self._modes.current.catching_up

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        return self._modes.undrafted_sizes

    def choose_k(self, d: Drafting, limit: int) -> int:
        if self.may_wait:
            if self.tries_more:
                return min(limit, max(TRIED_K, 2 * d.num_draft_tokens))
            return self._length.best_k(d, limit)
        return min(limit, 1) if self.mode.drafts else 0  # one tells that drafts come

    @property
    def tries_more(self) -> bool:
        """Whether all rows draft more than seems best: what was measured may not hold any more."""
        return self._modes.current.beginning or self._steps_with_few_drafts >= TRY_EVERY

    def patience_s(self, seq: Sequence) -> float:
        return self._waiting.patience_s(seq, self._num_running, tries_more=self.tries_more)

    def choose_rows(
        self, ready: list[Sequence], waiting: Rows[Sequence], num_prefilling: int, now: float
    ) -> Ready:
        step_s = self._waiting.microbatch_step_s((*ready, *waiting)) if self.may_wait else 0.0
        if step_s:
            ready = next_half(ready, len(waiting))
        if not waiting:
            return Ready(ready, now)
        wake_at = min([seq.drafting.round.deadline for seq in waiting])
        if not ready and not num_prefilling:
            return Ready([], wake_at)
        start_at = self._waiting.start_at(ready, waiting, num_prefilling, now, step_s)
        return Ready(ready, now) if start_at <= now else Ready([], min(start_at, wake_at))

    def step_done(self, step: StepDone) -> None:
        self._num_running = max(1, step.num_running)
        self._steps_with_few_drafts += 1
        if 2 * step.drafted > step.num_rows or self._steps_with_few_drafts > TRY_EVERY + TRY_STEPS:
            self._steps_with_few_drafts = 0
        self._modes.step_done(step)
