"""Measures the time that drafting ahead has."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from outrider.averages import Average
from outrider.drafting.proposer import Pace, SessionKey

_RISE: Final = 1 / 16
_RISE_OF_BOUND: Final = 1 / 256
_FORGOTTEN: Final = 64  # rounds without branches


class PaceMeter:
    """Step time as the scorer reports it, and network time as it shows.

    Between the hand-over of a draft and the arrival of the commit that verified it lie the network
    there and back, one step, and perhaps waits for other rows. So the network time is the least
    that was seen, forgotten slowly. A commit that verified no draft says nothing.

    Branches that arrive while the round before is verified wait for its end. So they show only an
    upper bound, and what was seen before is forgotten more slowly.
    """

    def __init__(self) -> None:
        self._step = Average()
        self._host, self._unmeasured = Average(), 0
        self._network_s: float | None = None
        self._arrived = 0.0  # time of the last commits
        # Times of hand-over:
        self._drafts: dict[SessionKey, float] = {}
        self._branches: dict[SessionKey, float] = {}  # for the outcomes of the current round
        self._chosen: dict[SessionKey, float] = {}  # branches that the current round verifies

    @property
    def pace(self) -> Pace:
        return Pace(self._step.mean, self._network_s or 0.0, host_s=self._host.mean)

    def after(self, now: float) -> Pace:
        """Return the pace, and the time since the last commits came."""
        return replace(self.pace, spent_s=now - self._arrived) if self._arrived else self.pace

    def handed_over(self, key: SessionKey, now: float) -> None:
        """Note that a draft for a session that had none is on its way."""
        self._drafts[key] = now

    def handed_ahead(self, key: SessionKey, now: float) -> None:
        """Note that branches for a session whose draft is verified are on their way."""
        self._branches[key] = now

    def host(self, seconds: float) -> None:
        """Note the host's time beside the loops of a round with branches."""
        self._unmeasured = 0
        self._host.add_time(seconds)

    def no_branches(self) -> None:
        """Note a round for which no branch was worth it.

        The host's time may say so, which only branches measure: after many it is forgotten.
        """
        self._unmeasured += 1
        if self._unmeasured == _FORGOTTEN:
            self._host = Average()

    def step(self, seconds: float) -> None:
        """Note the time of a step that a batch of commits came from."""
        if seconds > 0.0:
            self._step.add_time(seconds)

    def committed(self, key: SessionKey, arrived: float, step_s: float, *, verified: bool) -> None:
        """Note the commit of a step that took `step_s`, and `verified` a draft or not."""
        self._arrived = arrived
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
        else:  # one wrong measurement must not stay, and `seen` is only a bound
            self._network_s = known + min(seen - known, step_s) * _RISE_OF_BOUND

    def forget(self, key: SessionKey) -> None:
        for times in (self._drafts, self._branches, self._chosen):
            times.pop(key, None)
