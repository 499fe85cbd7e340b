"""Policies of waiting for drafts, for an engine whose steps have all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import R, Ready
from outrider.policy.fixed import FixedPolicy, policies


class LockstepPolicy(AdaptivePolicy):
    """A step waits for drafts while all of its rows together gain by that.

    A step without more drafts commits its rows and what they gain by the drafts at hand, in the
    time of a step. So to wait until some drafts are due pays if these bring more tokens than the
    rows commit meanwhile. What comes later is used in the next step, as far as it is still true.
    """

    def choose_rows(
        self, ready: list[R], waiting: Sequence[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        wake_at = _last_deadline(waiting, now)
        num_rows = len(ready) + len(waiting) + num_prefilling
        step_s = self.measured.costs.round_s(self.num_speculative_tokens)
        if step_s and len(waiting) < num_rows:  # of rows that all wait, each one's patience decides
            at_hand = [row.drafting.measured.gain for row in ready if row.draft is not None]
            rate = (num_rows + sum(at_hand)) / step_s
            wake_at = min(wake_at, self._worth_waiting_until(waiting, now, rate))
        return _all_rows(ready, waiting, now, wake_at)

    def _worth_waiting_until(self, waiting: Sequence[R], now: float, rate: float) -> float:
        """Return when enough drafts are due; all rows commit `rate` tokens a second meanwhile."""
        best, most, gain = now, 0.0, 0.0
        due = sorted(
            [(self._waiting.due(row.drafting, now), row.drafting) for row in waiting],
            key=lambda each: each[0],
        )
        for at, d in due:
            gain += d.measured.gain
            ahead = gain - rate * (at - now)
            if ahead > most:
                best, most = at, ahead
        return best


class LockstepFixedPolicy(FixedPolicy):
    """Every round drafts as much as it may, and a step waits for all of its drafts."""

    def choose_rows(
        self,
        ready: list[R],
        waiting: Sequence[R],
        num_prefilling: int,  # noqa: ARG002
        now: float,
    ) -> Ready[R]:
        return _all_rows(ready, waiting, now, _last_deadline(waiting, now))


POLICIES: Final = policies(LockstepPolicy, LockstepFixedPolicy)


def _last_deadline(waiting: Sequence[R], now: float) -> float:
    return max([row.drafting.round.deadline for row in waiting], default=now)


def _all_rows(ready: list[R], waiting: Sequence[R], now: float, wake_at: float) -> Ready[R]:
    if waiting and now < wake_at:
        return Ready([], wake_at)
    return Ready([*ready, *waiting], now)
