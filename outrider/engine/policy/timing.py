"""What the policy measures: step times by size, and how long drafts take."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple, TypeVar

STALE_AFTER = 12  # steps of other sizes after which a size's average is forgotten
MAX_NAMES = 256  # of proposers about which something is kept
PROMPTS_KEPT = 0.8  # per step with prompts, of what is known of their price
WARM = 0.5  # temperature of texts of which drafts meet clearly less
CALM_LASTS = 64  # batches made beside steps until they count although there were others

K = TypeVar("K")
V = TypeVar("V")


def remember(known: dict[K, V], name: K, value: V) -> None:
    """Keep `value` of a proposer, of the latest `MAX_NAMES`: it may call itself what it likes."""
    known.pop(name, None)
    known[name] = value
    if len(known) > MAX_NAMES:
        del known[next(iter(known))]


class Average:
    """Moving mean and mean deviation, as RFC 6298 keeps them for round-trip times.

    With two exceptions, because what is measured here can be a second instead of milliseconds once
    (a kernel is compiled, memory is mapped): one value moves the mean little, however large, and a
    mean that such a value began is left quickly.
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
    """Seconds of a step by its number of tokens: moving averages per power of two.

    They follow improvements faster than delays: noise comes in bursts that only ever add time. And
    no step is taken to be slower than one of more tokens: a size that ran once, cold, would be. A
    size that was not run for a while is measured anew: an average from before a burst, or from
    within one, would be held against sizes that were measured since.
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
        """Linear between the measured sizes; below the smallest as fast as that one.

        Beyond the largest, its slope from the smallest goes on; 0 if nothing was measured.
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


class PromptTimes:
    """Seconds that a prompt's token adds to a step. Large prompts count more, old ones less."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """So many tokens made a step so much longer."""
        self._seconds = PROMPTS_KEPT * self._seconds + max(0.0, seconds)
        self._tokens = PROMPTS_KEPT * self._tokens + num_tokens

    @property
    def token_s(self) -> float | None:
        """None as long as it is unknown."""
        return self._seconds / self._tokens if self._tokens else None


class StepDone(NamedTuple):
    """What a step brought."""

    num_running: int  # all rows that are admitted
    num_rows: int  # of the step
    tokens: int  # committed
    at: float  # when it ended
    drafted: int  # rows that verified a draft
    comparable: bool  # a row goes on from the step before, and a proposer is there
    followed: int  # rows that a proposer has answered at all
    prompt_tokens: int = 0  # that were processed
    prompts_only: bool = False  # while all rows that decode waited for drafts
    temperature: float = 0.0  # mean of all rows that are admitted
    may_run_ahead: bool = False  # a proposer of these rows can


class Delay(NamedTuple):
    """What is known of a draft that came."""

    at: float  # when
    seconds: float  # since it was wanted
    draft_s: float  # of these by drafting, as its proposer says
    num_tokens: int
    uncontended: bool  # no step was launched meanwhile
    apart: bool = False  # nor would one have made it late: it was made on a device of its own
    waited_s: float = 0.0  # for so long its row waited in vain before it went without


class DraftTimes:
    """How long one drafter's drafts take, from the commit to the arrival.

    A draft that is made while a step runs may share the device with it, and then both take longer.
    Whether waiting pays is asked for a row that would wait instead: so calm drafts, with no step
    beside them, are what counts, and others only as long as there are none. (Otherwise rows that
    once went ahead would never wait again: going ahead is what makes their drafts late.) What the
    others take longer says how much of the device a step takes away. On demand one that takes less
    than half as long counts, too: then the calm ones that are known waited for something else.
    And so does one for which its row had waited in vain, by half of what it then took beside the
    step: if only those counted that came in time, what drafts take at times would never be waited
    for, however often.

    Made apart, on demand and on another device, all of them count: a row that went without its
    draft waited for too short a time, and would again, as long as calm ones were awaited.

    Drafts that come at the same moment were made in one batch, which takes as long as its longest.
    """

    def __init__(self, *, on_demand: bool = True) -> None:
        self._on_demand = on_demand  # not ahead, where what is drafted is sometimes there already
        self._at = -math.inf  # of the last batch
        self._stall = Average()
        self._uncontended = Average()  # seconds
        self.uncontended = False  # what counts was made with no step beside it
        self._others = 0  # since the last calm one
        self._begin()

    def _begin(self) -> None:
        self.delay = Average()
        self._token_s = Average()
        self.longest = 0.0  # mean tokens of a batch's longest draft

    def observe(self, delay: Delay) -> None:
        """A draft came. Of a batch the first one tells: proposers send the longest first."""
        at, seconds, draft_s, num_tokens, uncontended, apart, waited_s = delay
        if at == self._at:
            return
        self._at = at
        if waited_s and not apart:
            uncontended, seconds = True, (waited_s + seconds) / 2  # each goes on at half its speed
        self._others = 0 if uncontended else self._others + 1
        if uncontended:
            self._uncontended.add(seconds)
        elif self._others == CALM_LASTS:
            self._uncontended = Average()
        uncontended |= apart
        if self.uncontended and not uncontended:
            usual_s = self.mean_s(num_tokens)
            self._stall.add(max(0.0, seconds - usual_s))
            uncontended = self._on_demand and seconds < usual_s / 2
            if not uncontended and self._others < CALM_LASTS:
                return
        if uncontended != self.uncontended:
            self.uncontended = uncontended
            self._begin()
        self.delay.add(seconds)
        if num_tokens:
            self._token_s.add(min(draft_s, seconds) / num_tokens)  # it need not be believed
        self.longest += (num_tokens - self.longest) / min(8, self.delay.count)

    @property
    def token_s(self) -> float:
        """Mean seconds per drafted token."""
        return self._token_s.mean

    def mean_s(self, num_tokens: float) -> float:
        """Mean seconds from a commit to the arrival of so many tokens; 0 tokens: what any takes."""
        return self.delay.mean + self.token_s * (num_tokens - self.longest)

    def uncontended_s(self, num_tokens: int) -> float:
        """The same of calm drafts, for which all rows waited together; at least what any take."""
        return max(self._uncontended.mean, self.mean_s(num_tokens))

    @property
    def contention_s(self) -> float:
        """Mean seconds by which a step beside a draft makes it late; 0 as long as unknown."""
        return self._stall.mean if self._stall.count else 0.0
