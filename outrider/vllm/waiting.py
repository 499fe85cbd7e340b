"""Policies of waiting for drafts, for an engine whose steps have all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import FixedPolicy, Policy, R, Ready, Row


class Lockstep(Policy):
    """A policy for steps that have all rows."""

    def may_gain_by_waiting(
        self,
        undrafted: Sequence[Row],  # noqa: ARG002
        drafted: Sequence[Row],  # noqa: ARG002
        num_prefilling: int,  # noqa: ARG002
    ) -> bool:
        """Return False where no wait for drafts pays, whatever each row's draft is like.

        The last step committed tokens of all rows, `undrafted` without a draft at hand and
        `drafted` with one. Then `choose_rows` need not be asked before the next step runs.
        """
        return self.may_wait


class LockstepPolicy(AdaptivePolicy, Lockstep):
    """A step waits for drafts while all of its rows together gain by that.

    A step without more drafts commits its rows and what they gain by the drafts at hand, in the
    time of a step. So to wait until some drafts are due pays if these bring more tokens than the
    rows commit meanwhile. What comes later is used in the next step, as far as it is still true.
    """

    def choose_rows(
        self, ready: list[R], waiting: Sequence[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        wake_at = _last_deadline(waiting, now)
        drafted = [row for row in ready if row.draft is not None]
        num_others = len(ready) - len(drafted) + num_prefilling
        if rate := self._rate(waiting, drafted, num_others):
            wake_at = min(wake_at, self._worth_waiting_until(waiting, now, rate))
        return _all_rows(ready, waiting, now, wake_at)

    def may_gain_by_waiting(
        self, undrafted: Sequence[Row], drafted: Sequence[Row], num_prefilling: int
    ) -> bool:
        """Compare all that late drafts bring with what rows commit until the first may come."""
        if not self.may_wait:
            return False
        rate, rows = self._rate(undrafted, drafted, num_prefilling), [r.drafting for r in undrafted]
        if not rate:
            return True
        times = self.measured.draft_times
        kinds = {(d.drafter, d.num_draft_tokens): d for d in rows}
        first_s = min([times(d).delays.mean_s(d.num_draft_tokens) for d in kinds.values()])
        return sum([d.measured.gain for d in rows]) > rate * first_s

    def _rate(self, waiting: Sequence[Row], drafted: Sequence[Row], num_others: int) -> float:
        """Return the tokens a second of all rows in a step at once.

        0 if unknown, or if all rows wait: then each one's patience decides.
        """
        step_s = self.measured.steps.round_s(self.num_speculative_tokens)
        if not (step_s and (drafted or num_others)):
            return 0.0
        gain = sum([row.drafting.measured.gain for row in drafted])
        return (len(waiting) + len(drafted) + num_others + gain) / step_s

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


class LockstepFixedPolicy(FixedPolicy, Lockstep):
    """Every round drafts as much as it may, and a step waits for all of its drafts."""

    def choose_rows(
        self,
        ready: list[R],
        waiting: Sequence[R],
        num_prefilling: int,  # noqa: ARG002
        now: float,
    ) -> Ready[R]:
        return _all_rows(ready, waiting, now, _last_deadline(waiting, now))


POLICIES: Final[dict[str, Callable[[int], Lockstep]]] = {
    "adaptive": LockstepPolicy,
    "fixed": LockstepFixedPolicy,
    "off": lambda _: LockstepFixedPolicy(0),
}


def _last_deadline(waiting: Sequence[R], now: float) -> float:
    return max([row.drafting.round.deadline for row in waiting], default=now)


def _all_rows(ready: list[R], waiting: Sequence[R], now: float, wake_at: float) -> Ready[R]:
    if waiting and now < wake_at:
        return Ready([], wake_at)
    return Ready([*ready, *waiting], now)
