"""Measures the pace that drafting ahead has to keep."""

from __future__ import annotations

from typing import Final

from outrider.drafting.branch_plan import Pace
from outrider.drafting.proposer import SessionKey
from outrider.engine.measured import Average

_RISE: Final = 1 / 16


class PaceMeter:
    """The scorer's step time as it says, and the way to it and back as it shows.

    Between the hand-over of a draft and the arrival of the commit that verified it lie the way
    there and back and one step. Rows also wait for each other, which only adds to it: so the way is
    the least of what was seen, forgotten slowly.
    """

    def __init__(self) -> None:
        self._step = Average()
        self._network_s: float | None = None
        self._handed_over: dict[SessionKey, float] = {}

    @property
    def pace(self) -> Pace:
        return Pace(self._step.mean, self._network_s or 0.0)

    def handed_over(self, key: SessionKey, now: float) -> None:
        """A draft for a session that had none is on its way."""
        self._handed_over[key] = now

    def step(self, seconds: float) -> None:
        """A batch of commits came from a step that took so long."""
        if seconds > 0.0:
            self._step.add(seconds)

    def committed(self, key: SessionKey, arrived: float, step_s: float) -> None:
        """The session's commit arrived, from a step that took `step_s`."""
        handed_over = self._handed_over.pop(key, None)
        if handed_over is None or step_s == 0.0 or arrived < handed_over:
            return
        seen = max(0.0, arrived - handed_over - step_s)
        known = self._network_s
        if known is None or seen < known:
            self._network_s = seen
        else:
            self._network_s = known + (seen - known) * _RISE

    def forget(self, key: SessionKey) -> None:
        """The session is over."""
        self._handed_over.pop(key, None)
