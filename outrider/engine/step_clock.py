"""Measure where the time of a step goes: on the host, on the device, and between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outrider.engine.in_flight import InFlight
from outrider.engine.runner import Pending
from outrider.engine.step import Step, StepResult
from outrider.types import StepTimings


class StepClock:
    """The times of the steps of one engine; `now` is its clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._committed_at = now()  # by the last step
        self._result_at: float | None = None  # of the last step, if the next one follows directly
        self._draft_s = 0.0  # of the engine's thread, for the next step

    def count_drafting(self, seconds: float) -> None:
        """Count time that the engine's thread spent on drafts for the next step."""
        self._draft_s += seconds

    def nothing_ready(self) -> None:
        """Note that no step follows the last one directly."""
        self._result_at = None

    def launched(self, step: Step, pending: Pending, began: float, scheduled: float) -> InFlight:
        """Note a step whose scheduling began and ended then, and that was launched just now."""
        draft_s, self._draft_s = self._draft_s, 0.0
        gap_ms = None  # with device drafts the device is still busy with these
        if self._result_at is not None and step.device_drafts is None:
            gap_ms = (self.now() - self._result_at - draft_s) * 1e3
        timings = StepTimings(
            schedule_ms=(scheduled - began) * 1e3,
            forward_ms=0.0,
            verify_ms=0.0,
            commit_ms=0.0,
            idle_ms=(began - self._committed_at - draft_s) * 1e3,
            num_rows=len(step.rows),
            num_tokens=step.num_tokens,
            gap_ms=gap_ms,
            draft_ms=draft_s * 1e3,
        )
        return InFlight(step, pending, began, scheduled, timings)

    def result(self) -> float:
        """Note that a step's result came, and return when."""
        self._result_at = now = self.now()
        return now

    def committed(self, flight: InFlight, result: StepResult, since: float) -> StepTimings:
        """Note that a step's tokens are committed, which began at `since`; return its times."""
        self._committed_at = self.now()
        return replace(
            flight.timings,
            forward_ms=result.forward_s * 1e3,
            verify_ms=result.verify_s * 1e3,
            commit_ms=(self._committed_at - since) * 1e3,
        )
