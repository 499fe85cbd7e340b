"""Policies of waiting for drafts, for an engine whose steps have all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import R, Ready
from outrider.policy.fixed import FixedPolicy, policies


class LockstepPolicy(AdaptivePolicy):
    """A step waits for drafts while all of its rows together gain by that."""

    def choose_rows(
        self, ready: list[R], waiting: Sequence[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        wake_at = _last_deadline(waiting, now)
        num_rows = len(ready) + len(waiting) + num_prefilling
        step_s = self.measured.costs.round_s(self.num_speculative_tokens)
        if step_s and len(waiting) < num_rows:  # of rows that all wait, each one's patience decides
            gain = sum([row.drafting.measured.gain for row in waiting])
            since = max([row.drafting.round.committed_at for row in waiting], default=now)
            wake_at = min(wake_at, since + step_s * gain / num_rows)
        return _all_rows(ready, waiting, now, wake_at)


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
