"""What steps and drafts take, as measured: the policy's formulas begin with it."""

from __future__ import annotations

import math
from itertools import takewhile

from outrider.engine.policy.timing import Delay, DraftTimes, StepTimes, remember
from outrider.engine.rounds import Drafting

SLACK = 0.25  # of a mean delay: drafts that took the same for a while may yet be late once
SIZES = (*range(1, 17), 20, 24, 32, 48, 64, 96)  # of K that are compared, beside the limit


class CostModel:
    """All in seconds, 0 as long as nothing was measured. Only the policy says what was."""

    def __init__(self) -> None:
        self.num_rows = 1  # of the last step that only verified
        self._steps = StepTimes()
        self._drafts: dict[tuple[str, bool], DraftTimes] = {}  # by drafter, and if it runs ahead
        # The same for all rows until something is measured: by K, and what `rounds`, `usual` say.
        self._round_s: dict[int, float] = {}
        self._rounds: dict[tuple[str, bool, int], list[tuple[int, float, float]]] = {}
        self._usual: dict[tuple[str, bool, int], tuple[float, float, float]] = {}

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step that only verified."""
        self.num_rows = num_rows
        self._steps.observe(num_tokens, seconds)
        self._round_s, self._rounds, self._usual = {}, {}, {}

    def observe_delay(self, d: Drafting, delay: Delay) -> None:
        """A draft came for a row."""
        times = self.draft_times(d) or DraftTimes(on_demand=not d.runs_ahead)
        remember(self._drafts, (d.drafter, d.runs_ahead), times)
        times.observe(delay)
        self._rounds, self._usual = {}, {}

    def forget_drafts(self, *, ahead: bool | None = None) -> None:
        """What drafts take that are made ahead, or on demand; None: both."""
        kept = {key: times for key, times in self._drafts.items() if ahead not in (None, key[1])}
        self._drafts, self._rounds, self._usual = kept, {}, {}

    def step_s(self, num_tokens: int) -> float:
        """A step of so many tokens."""
        return self._steps.estimate(num_tokens)

    def round_s(self, k: int) -> float:
        """A step of as many rows as the last one, with `k` draft tokens each."""
        known = self._round_s.get(k)
        if known is None:
            known = self._round_s[k] = self.step_s(self.num_rows * (1 + k))
        return known

    def rounds(self, d: Drafting, limit: int) -> list[tuple[int, float, float]]:
        """The K that are compared for a row, each with `round_s` and its draft's delay.

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
                for k in (*takewhile(lambda k: k < limit, SIZES), limit)
            ]
        return known

    def draft_times(self, d: Drafting) -> DraftTimes | None:
        """What a row's drafts take, made as they are now; None if none of them was measured."""
        return self._drafts.get((d.drafter, d.runs_ahead))

    def delay_s(self, d: Drafting, num_tokens: float | None = None) -> float:
        """From a row's commit to the arrival of its next draft, or of one of so many tokens."""
        times, k = self.draft_times(d), d.num_draft_tokens if num_tokens is None else num_tokens
        return 0.0 if times is None else times.mean_s(k)

    def usual(self, d: Drafting) -> tuple[float, float, float]:
        """Of a row: `round_s`, `delay_s`, and by when its draft has come, if it is as most.

        The last is infinite as long as none was measured.
        """
        key = d.drafter, d.runs_ahead, d.num_draft_tokens
        known = self._usual.get(key)
        if known is None:
            times, delay_s, by_s = self.draft_times(d), self.delay_s(d), math.inf
            if times is not None:
                by_s = delay_s + max(4 * times.delay.deviation, SLACK * delay_s)
            known = self._usual[key] = self.round_s(d.num_draft_tokens), delay_s, by_s
        return known

    def contention_s(self, d: Drafting) -> float:
        """By so much a step beside it makes a row's draft late; nothing if made ahead."""
        times = self.draft_times(d)
        return 0.0 if times is None or d.runs_ahead else times.contention_s
