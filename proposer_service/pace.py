"""Measures the pace that drafting ahead has to keep."""

from __future__ import annotations

from typing import Final

from outrider.drafting.proposer import Pace, SessionKey
from outrider.engine.policy.timing import Average

_RISE: Final = 1 / 16


class PaceMeter:
    """The scorer's step time as it says, and the way to it and back as it shows.

    Between the hand-over of a draft and the arrival of the commit that verified it lie the way
    there and back and one step. Rows also wait for each other, which only adds to it: so the way is
    the least of what was seen, forgotten slowly. A step that went ahead without the draft, and may
    have begun before it came, says nothing.

    Branches that were handed over while the round before was verified wait for its verdict, if they
    are not late. So they only show that the way is no longer.
    """

    def __init__(self) -> None:
        self._step = Average()
        self._network_s: float | None = None
        self._drafts: dict[SessionKey, float] = {}  # when they were handed over
        self._branches: dict[SessionKey, float] = {}  # the same, and their verdict is to come
        self._chosen: dict[SessionKey, float] = {}  # the same, and they are verified next

    @property
    def pace(self) -> Pace:
        return Pace(self._step.mean, self._network_s or 0.0)

    def handed_over(self, key: SessionKey, now: float) -> None:
        """A draft for a session that had none is on its way."""
        self._drafts[key] = now

    def handed_ahead(self, key: SessionKey, now: float) -> None:
        """Branches for a session whose draft is verified are on their way."""
        self._branches[key] = now

    def step(self, seconds: float) -> None:
        """A batch of commits came from a step that took so long."""
        if seconds > 0.0:
            self._step.add(seconds)

    def committed(self, key: SessionKey, arrived: float, step_s: float, *, verified: bool) -> None:
        """The session's commit arrived, from a step that took `step_s` and `verified` a draft."""
        draft, chosen = self._drafts.pop(key, None), self._chosen.pop(key, None)
        if key in self._branches:
            self._chosen[key] = self._branches.pop(key)
        begun = chosen if draft is None else draft
        if begun is None or step_s == 0.0 or not verified:
            return
        seen = max(0.0, arrived - begun - step_s)
        known = self._network_s
        if known is None or seen < known:
            self._network_s = seen
        elif draft is not None:
            self._network_s = known + (seen - known) * _RISE

    def forget(self, key: SessionKey) -> None:
        """The session is over."""
        for times in (self._drafts, self._branches, self._chosen):
            times.pop(key, None)
