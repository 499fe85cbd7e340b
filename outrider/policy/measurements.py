"""Measure steps and drafts by moving averages. All times are in seconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.policy.row import Drafting

UNSEEN_STEPS = 3  # of other sizes, after which a size becomes faster or slower with them
MAX_NAMES = 256  # proposers that are remembered: one may call itself what it likes
UNCONTENDED_LASTS = 64  # batches beside steps in a row, after which those alone count no more
SLACK = 0.25  # of a mean delay: drafts that took the same for a while may yet be late once

K = TypeVar("K")
V = TypeVar("V")
Num = TypeVar("Num", float, NDArray[np.float64])


def remember(known: dict[K, V], name: K, value: V) -> None:
    """Keep a value by name, of the latest `MAX_NAMES` names."""
    known.pop(name, None)
    known[name] = value
    if len(known) > MAX_NAMES:
        del known[next(iter(known))]


class Average:
    """Moving mean and mean deviation, as RFC 6298 keeps them for round-trip times.

    There are two exceptions, because one value may be a second instead of milliseconds: one value
    moves the mean little, however large it is, and a mean that such a value began is left quickly.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.deviation = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Take in one measurement."""
        if not self.mean or value < self.mean / 4:  # no multiple of 0 is more
            self.mean, self.deviation = value, value / 2
        else:
            value = min(value, 4 * self.mean)
            self.deviation += (abs(value - self.mean) - self.deviation) / 4
            self.mean += (value - self.mean) / 8
        self.count += 1


class StepTimes:
    """Seconds of a step by its number of tokens, as moving averages by quarter powers of two.

    They follow improvements faster than delays, because noise only ever adds time. No step counts
    as slower than one of more tokens: a size that ran once, cold, would. A load beside the steps
    slows all of them down: sizes that do not run change with those that do.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float, int]] = {}  # tokens, seconds, its last step
        self._steps = 0
        self._tokens: list[float] = []  # of the measured sizes, in order
        self._seconds: list[float] = []

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one step."""
        self._steps += 1
        name = int(4 * math.log2(num_tokens))
        tokens, before, _ = self._sizes.get(name, (float(num_tokens), seconds, 0))
        after = before + (seconds - before) * (1 / 4 if seconds < before else 1 / 16)
        self._sizes[name] = tokens + (num_tokens - tokens) / 8, after, self._steps
        for other, (each, its_s, seen) in self._sizes.items():
            if before and self._steps - seen > UNSEEN_STEPS:
                self._sizes[other] = each, its_s * after / before, seen
        points = sorted(self._sizes.values())
        self._tokens = [each for each, _, _ in points]
        fastest = np.minimum.accumulate([its_s for _, its_s, _ in reversed(points)])
        self._seconds = fastest[::-1].tolist()

    def estimate(self, num_tokens: float) -> float:
        """Return the seconds of a step, linear between the measured sizes; 0 if there are none.

        Below the smallest size it is as fast as that one. Beyond the largest the slope from the
        smallest goes on.
        """
        tokens, seconds = self._tokens, self._seconds
        if len(tokens) < 2 or num_tokens <= tokens[0]:
            return seconds[0] if seconds else 0.0
        high = bisect_left(tokens, num_tokens)
        low = high - 1 if high < len(tokens) else 0
        high = min(high, len(tokens) - 1)
        slope = (seconds[high] - seconds[low]) / (tokens[high] - tokens[low])
        return seconds[low] + slope * (num_tokens - tokens[low])

    def estimates(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of steps whose sizes are given in order."""
        most = float(num_tokens[-1])
        tokens, seconds = self._tokens, self._seconds
        if most > tokens[-1]:
            tokens, seconds = [*tokens, most], [*seconds, self.estimate(most)]
        return np.interp(num_tokens, tokens, seconds)


@dataclass(frozen=True, slots=True)
class Delay:
    """One batch of drafts: how long it took, and under which circumstances."""

    seconds: float  # from the commit to the arrival
    draft_s: float  # of these by drafting, as its proposer says
    num_tokens: int  # of the longest draft
    uncontended: bool  # no step was launched meanwhile
    own_device: bool = False  # a step would not have made it late
    waited_s: float = 0.0  # how long its row waited in vain before it went without


class _Batches:
    """Batches of drafts under like circumstances."""

    def __init__(self) -> None:
        self.delay = Average()  # from the commit to the arrival
        self.token_s = Average()  # of drafting a token
        self.longest = 0.0  # mean tokens of a batch's longest draft

    def add(self, delay: Delay, seconds: float) -> None:
        self.delay.add(seconds)
        if delay.num_tokens:  # a proposer is not believed to have drafted longer than that
            self.token_s.add(min(delay.draft_s, seconds) / delay.num_tokens)
        self.longest += (delay.num_tokens - self.longest) / min(8, self.delay.count)


class DraftTimes:
    """The delays of one drafter's drafts, from the commit to the arrival.

    A draft that is made beside a step may share the device with it, and then both take longer.
    Whether waiting pays is asked for a row that would wait instead of starting such a step. So
    drafts beside steps count only where there are no others: else rows that once went ahead would
    never wait again. They do count where another device makes them on demand. A draft for which
    its row waited in vain counts by half of what it then took beside the step.
    """

    def __init__(self) -> None:
        self._alone, self._beside = _Batches(), _Batches()
        self._beside_in_a_row = 0

    def observe(self, delay: Delay) -> None:
        """Take in a batch."""
        seconds, alone = delay.seconds, delay.uncontended or delay.own_device
        if delay.waited_s and not delay.own_device:  # draft and step went on at half their speed
            alone, seconds = True, (delay.waited_s + seconds) / 2
        self._beside_in_a_row = 0 if alone else self._beside_in_a_row + 1
        (self._alone if alone else self._beside).add(delay, seconds)

    @property
    def _counting(self) -> _Batches:
        beside = not self._alone.delay.count or self._beside_in_a_row >= UNCONTENDED_LASTS
        return self._beside if beside else self._alone

    @property
    def token_s(self) -> float:
        """Mean seconds per drafted token."""
        return self._counting.token_s.mean

    @property
    def contention_s(self) -> float:
        """Mean seconds by which a step beside a draft makes it late; 0 if that is unknown."""
        alone, beside = self._alone.delay, self._beside.delay
        return max(0.0, beside.mean - alone.mean) if alone.count and beside.count else 0.0

    def mean_s(self, num_tokens: Num) -> Num:
        """Return the mean seconds from a commit to the arrival of so many tokens."""
        known = self._counting
        return known.delay.mean + known.token_s.mean * (num_tokens - known.longest)

    def most_s(self, num_tokens: float) -> float:
        """Return the seconds within which most drafts of so many tokens have come."""
        mean_s = self.mean_s(num_tokens)
        return mean_s + max(4 * self._counting.delay.deviation, SLACK * mean_s)


class CostModel:
    """The times of steps and of rows' next drafts."""

    def __init__(self) -> None:
        self.num_rows = 1  # of the last step that only verified
        self.padded = False  # every row of a step takes as long as that of the longest draft
        self.steps = StepTimes()
        self._drafts: dict[tuple[str, bool], DraftTimes] = {}  # by drafter, and if it runs ahead

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take in a step that only verified."""
        self.num_rows = num_rows
        self.steps.observe(num_tokens, seconds)

    def observe_delay(self, d: Drafting, delay: Delay) -> None:
        """Take in a batch of drafts, of which this row's is the first."""
        times = self.draft_times(d) or DraftTimes()
        remember(self._drafts, (d.drafter, d.runs_ahead), times)
        times.observe(delay)

    def round_s(self, k: float) -> float:
        """Return the seconds of a step of as many rows as the last, with k draft tokens each."""
        return self.steps.estimate(self.num_rows * (1 + k))

    def draft_times(self, d: Drafting) -> DraftTimes | None:
        """Return what a row's drafts take as they are made now; None if that is unknown."""
        return self._drafts.get((d.drafter, d.runs_ahead))
