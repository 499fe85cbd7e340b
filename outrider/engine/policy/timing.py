"""What steps, prompts and drafts take, as moving averages."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TypeVar

STALE_AFTER = 12  # steps of other sizes after which a size's average is forgotten
MAX_NAMES = 256  # proposers that are remembered: one may call itself what it likes
UNCONTENDED_LASTS = 64  # contended batches after which the last uncontended one is forgotten

K = TypeVar("K")
V = TypeVar("V")


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
    """Seconds of a step by its number of tokens, as moving averages per power of two.

    They follow improvements faster than delays, because noise only ever adds time. No step counts
    as slower than one of more tokens: a size that ran once, cold, would. A size that was not run
    for a while is measured anew, so that all sizes are measured under the same load.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # bucket: mean tokens, mean seconds
        self._sorted: list[tuple[float, float]] = []
        self._steps = 0
        self._seen: dict[int, int] = {}  # bucket: the last step of that size

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one step."""
        bucket = (num_tokens - 1).bit_length()
        self._steps += 1
        stale = self._steps - self._seen.get(bucket, 0) > STALE_AFTER
        self._seen[bucket] = self._steps
        if stale:
            self._points.pop(bucket, None)
        tokens, mean = self._points.get(bucket, (num_tokens, seconds))
        gain = 1 / 4 if seconds < mean else 1 / 16
        point = (tokens + (num_tokens - tokens) / 8, mean + (seconds - mean) * gain)
        self._points[bucket] = point
        self._sorted = []
        fastest = math.inf
        for mean_tokens, mean in sorted(self._points.values(), reverse=True):
            fastest = min(fastest, mean)
            self._sorted.insert(0, (mean_tokens, fastest))

    def estimate(self, num_tokens: int) -> float:
        """Return the seconds of a step, linear between the measured sizes; 0 if there are none.

        Below the smallest size it is as fast as that one. Beyond the largest the slope from the
        smallest goes on.
        """
        points = self._sorted
        if not points or num_tokens <= points[0][0]:
            return points[0][1] if points else 0.0
        if len(points) == 1:
            return points[0][1]
        low, high = points[0], points[-1]
        if num_tokens <= high[0]:
            i = bisect_left(points, (num_tokens,))
            low, high = points[i - 1], points[i]
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return low[1] + slope * (num_tokens - low[0])


@dataclass(frozen=True, slots=True)
class Delay:
    """One batch of drafts: how long it took, and under which circumstances."""

    seconds: float  # from the commit to the arrival
    draft_s: float  # of these by drafting, as its proposer says
    num_tokens: int  # of the longest draft
    uncontended: bool  # no step was launched meanwhile
    own_device: bool = False  # a step would not have made it late
    waited_s: float = 0.0  # how long its row waited in vain before it went without


class DraftTimes:
    """How long one drafter's drafts take, from the commit to the arrival.

    A draft that is made beside a step may share the device with it, and then both take longer.
    Whether waiting pays is asked for a row that would wait instead of starting such a step. So
    uncontended drafts count, and contended ones only as long as there are no others. If contended
    ones counted, rows that once went ahead would never wait again. Two contended drafts count:

    - one for which its row waited in vain, by half of what it then took beside the step: else what
      drafts take at times would never be waited for;
    - on demand and on another device, all of them: a step does not slow them down.
    """

    def __init__(self) -> None:
        self._contention = Average()
        self._are_uncontended = False  # what counts
        self._contended_in_a_row = 0
        self._restart()

    def _restart(self) -> None:
        self.delay = Average()
        self._token_s = Average()
        self.longest = 0.0  # mean tokens of a batch's longest draft

    def observe(self, delay: Delay) -> None:
        """Take in a batch."""
        seconds, uncontended = delay.seconds, delay.uncontended
        if delay.waited_s and not delay.own_device:  # draft and step went on at half their speed
            uncontended, seconds = True, (delay.waited_s + seconds) / 2
        self._contended_in_a_row = 0 if uncontended else self._contended_in_a_row + 1
        uncontended |= delay.own_device
        if uncontended != self._are_uncontended:
            if not uncontended:
                self._contention.add(max(0.0, seconds - self.mean_s(delay.num_tokens)))
                if self._contended_in_a_row < UNCONTENDED_LASTS:
                    return
            self._are_uncontended = uncontended
            self._restart()
        self.delay.add(seconds)
        if delay.num_tokens:  # a proposer is not believed to have drafted longer than that
            self._token_s.add(min(delay.draft_s, seconds) / delay.num_tokens)
        self.longest += (delay.num_tokens - self.longest) / min(8, self.delay.count)

    @property
    def token_s(self) -> float:
        """Mean seconds per drafted token."""
        return self._token_s.mean

    @property
    def contention_s(self) -> float:
        """Mean seconds by which a step beside a draft makes it late; 0 if that is unknown."""
        return self._contention.mean

    def mean_s(self, num_tokens: float) -> float:
        """Return the mean seconds from a commit to the arrival of so many tokens."""
        return self.delay.mean + self.token_s * (num_tokens - self.longest)
