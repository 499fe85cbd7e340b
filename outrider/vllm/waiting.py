"""Policies of waiting for drafts, for an engine whose steps have all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import Policy, R, Ready, Row


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
    """All rows stay together, as where drafts are made ahead (`outrider.policy.waiting`)."""

    def choose_rows(
        self, ready: list[R], waiting: Sequence[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        return self._waiting.together(ready, waiting, num_prefilling, now)

    def may_gain_by_waiting(
        self, undrafted: Sequence[Row], drafted: Sequence[Row], num_prefilling: int
    ) -> bool:
        """Compare all that late drafts bring with what rows commit until the first may come."""
        if not self.may_wait:
            return False
        rows = [row.drafting for row in undrafted]
        rate = self._waiting.rate(undrafted, drafted, num_prefilling)
        if not rate:
            return True
        times = self.measured.draft_times
        kinds = {(d.drafter, d.num_draft_tokens): d for d in rows}
        first_s = min([times(d).delays.mean_s(d.num_draft_tokens) for d in kinds.values()])
        return sum([d.measured.gain for d in rows]) > rate * first_s


class LockstepFixedPolicy(Lockstep):
    """Every round drafts as much as it may, and a step waits for all of its drafts."""

    def choose_rows(
        self,
        ready: list[R],
        waiting: Sequence[R],
        num_prefilling: int,  # noqa: ARG002
        now: float,
    ) -> Ready[R]:
        wake_at = max([row.drafting.round.deadline for row in waiting], default=now)
        return Ready([], wake_at) if now < wake_at else Ready([*ready, *waiting], now)


POLICIES: Final[dict[str, Callable[[int], Lockstep]]] = {
    "adaptive": LockstepPolicy,
    "fixed": LockstepFixedPolicy,
    "off": lambda _: LockstepFixedPolicy(0),
}
