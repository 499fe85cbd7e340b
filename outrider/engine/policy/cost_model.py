"""What a step and a row's next draft are expected to take, from what was measured."""

from __future__ import annotations

import math
from itertools import takewhile

from outrider.engine.policy.row import Drafting
from outrider.engine.policy.timing import Delay, DraftTimes, StepTimes, remember

SLACK = 0.25  # of a mean delay: drafts that took the same for a while may yet be late once
SIZES = (*range(1, 17), 20, 24, 32, 48, 64, 96)  # values of K that are compared, beside the limit


class CostModel:
    """All times in seconds, 0 as long as nothing was measured."""

    def __init__(self) -> None:
        self.num_rows = 1  # of the last step that only verified
        self._steps = StepTimes()
        self._drafts: dict[tuple[str, bool], DraftTimes] = {}  # by drafter, and if it runs ahead
        # Results of methods below, until something is measured: rows ask again and again.
        self._rounds: dict[tuple[str, bool, int], list[tuple[int, float, float]]] = {}
        self._usual: dict[tuple[str, bool, int], tuple[float, float, float]] = {}

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take in a step that only verified."""
        self.num_rows = num_rows
        self._steps.observe(num_tokens, seconds)
        self._rounds, self._usual = {}, {}

    def observe_delay(self, d: Drafting, delay: Delay) -> None:
        """Take in a batch of drafts, of which this row's is the first."""
        times = self.draft_times(d) or DraftTimes()
        remember(self._drafts, (d.drafter, d.runs_ahead), times)
        times.observe(delay)
        self._rounds, self._usual = {}, {}

    def step_s(self, num_tokens: int) -> float:
        """Return the seconds of a step of so many tokens."""
        return self._steps.estimate(num_tokens)

    def round_s(self, k: int) -> float:
        """Return those of a step of as many rows as the last one, with `k` draft tokens each."""
        return self.step_s(self.num_rows * (1 + k))

    def rounds(self, d: Drafting, limit: int) -> list[tuple[int, float, float]]:
        """Return the K that are compared for a row, from 0, with `round_s` and a draft's delay.

        On demand a row waits for its batch's longest draft: alone it can do little about that.
        """
        key = d.drafter, d.runs_ahead, limit
        known = self._rounds.get(key)
        if known is None:
            times, least = self.draft_times(d), 0.0
            if times is not None and not d.runs_ahead and self.num_rows > 1:
                least = times.longest - 1.0
            known = self._rounds[key] = [
                (k, self.round_s(k), self.delay_s(d, max(k, least)))
                for k in (0, *takewhile(lambda k: k < limit, SIZES), limit)
            ]
        return known

    def draft_times(self, d: Drafting) -> DraftTimes | None:
        """Return what a row's drafts take as they are made now; None if that is unknown."""
        return self._drafts.get((d.drafter, d.runs_ahead))

    def delay_s(self, d: Drafting, num_tokens: float) -> float:
        """Return the seconds from a row's commit to a draft of so many tokens."""
        times = self.draft_times(d)
        return 0.0 if times is None else times.mean_s(num_tokens)

    def usual(self, d: Drafting) -> tuple[float, float, float]:
        """Return a row's `round_s`, `delay_s`, and the delay by which most drafts have come.

        The last is infinite as long as none was measured.
        """
        key = d.drafter, d.runs_ahead, d.num_draft_tokens
        known = self._usual.get(key)
        if known is None:
            times, delay_s, by_s = self.draft_times(d), 0.0, math.inf
            if times is not None:
                delay_s = times.mean_s(d.num_draft_tokens)
                by_s = delay_s + max(4 * times.delay.deviation, SLACK * delay_s)
            known = self._usual[key] = self.round_s(d.num_draft_tokens), delay_s, by_s
        return known

    def contention_s(self, d: Drafting) -> float:
        """Return how late a step beside it makes a row's draft, on demand."""
        times = self.draft_times(d)
        return 0.0 if times is None or d.runs_ahead else times.contention_s
