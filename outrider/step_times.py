"""Times of steps by their tokens, and how many tokens a step really runs."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from outrider.averages import Average

STALE_STEPS = 12  # of other sizes
FAR = 2.0**40  # tokens, more than any step has


class StepTimes:
    """Seconds of a step by its number of tokens, as averages by quarter powers of two.

    No step counts as slower than one of more tokens: a size that ran once, cold, would. A size that
    did not run for long is measured anew if it is faster by now: its average may be of a burst.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[Average, Average]] = {}  # tokens, seconds
        self._steps = 0
        self._ran_at: dict[int, int] = {}  # by size: the number of its last step
        self._tokens, self._seconds = [0.0, FAR], [0.0, 0.0]  # of the measured sizes, in order

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one step."""
        size = _size_of(num_tokens)
        tokens, times = self._sizes.setdefault(size, (Average(), Average()))
        tokens.add(num_tokens)
        self._steps += 1
        if self._steps - self._ran_at.get(size, 0) > STALE_STEPS and seconds < times.mean:
            times.weight = 0.0
        self._ran_at[size] = self._steps
        times.add_time(seconds)
        points = sorted([(tokens.mean, times.mean) for tokens, times in self._sizes.values()])
        self._tokens = [tokens for tokens, _ in points]
        self._seconds = [*accumulate([seconds for _, seconds in reversed(points)], min)][::-1]
        more_s, more = self._seconds[-1] - self._seconds[0], self._tokens[-1] - self._tokens[0]
        self._tokens.append(FAR)
        self._seconds.append(self._seconds[-1] + (FAR - self._tokens[-2]) * more_s / (more or 1.0))

    def outdated(self, num_tokens: float) -> bool:
        """Tell whether no step of this size or a larger one ran for long."""
        size = _size_of(num_tokens)
        ran_at = max([at for each, at in self._ran_at.items() if each >= size], default=0)
        return self._steps - ran_at > STALE_STEPS

    def estimate(self, num_tokens: float) -> float:
        """Return the seconds of a step; see `estimates`."""
        tokens, seconds = self._tokens, self._seconds
        i = bisect_right(tokens, num_tokens)
        if not i:
            return seconds[0]
        slope = (seconds[i] - seconds[i - 1]) / (tokens[i] - tokens[i - 1])
        return slope * (num_tokens - tokens[i - 1]) + seconds[i - 1]

    def estimates(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of steps, linear between the measured sizes; 0 if there are none.

        Below the smallest size they are as fast as that one. Beyond the largest the slope from the
        smallest goes on.
        """
        seconds: NDArray[np.float64] = np.interp(num_tokens, self._tokens, self._seconds)
        return seconds


class StepSizes:
    """The sizes of captured steps, as (rows, tokens): smaller ones are filled up.

    A size of as many tokens as rows is for steps in which each row has one. Any other is for steps
    of at most so many rows and tokens. Without sizes a step runs what it has.
    """

    def __init__(self, sizes: Iterable[tuple[int, int]] = ()) -> None:
        self._sizes = sorted(sizes, key=lambda size: size[1])
        self._by_rows: dict[int, tuple[float, list[float], NDArray[np.float64]]] = {}

    def run(self, num_rows: int, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the tokens that steps of `num_rows` rows run, given in any shape."""
        single, _, longer = self._by_rows.get(num_rows) or self._find(num_rows)
        several = longer[np.searchsorted(longer, num_tokens)]
        filled = np.where(num_tokens <= num_rows, single, several)
        return np.where(filled < math.inf, filled, num_tokens)

    def run_one(self, num_rows: int, num_tokens: float) -> float:
        """Return what `run` does for one step."""
        single, longer, _ = self._by_rows.get(num_rows) or self._find(num_rows)
        if num_tokens > num_rows:
            single = longer[bisect_left(longer, num_tokens)]
        return num_tokens if math.isinf(single) else single

    def _find(self, num_rows: int) -> tuple[float, list[float], NDArray[np.float64]]:
        """Return the size of rows of one token, and the others in order; both end in infinity.

        One of the others is searched in a list, and several in an array: each is faster there.
        """
        fitting = [size for size in self._sizes if size[0] >= num_rows]
        single = next((float(tokens) for rows, tokens in fitting if rows == tokens), math.inf)
        longer = [*(float(tokens) for rows, tokens in fitting if tokens > rows), math.inf]
        found = single, longer, np.array(longer)
        self._by_rows[num_rows] = found
        return found


class EngineStepTimes(StepTimes):
    """Times of an engine's steps, by their rows and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = StepSizes()
        self.padded = False  # every row of a step takes as long as that of the longest draft
        self.num_rows = 1  # of the last step that only verified
        self._rounds_s: dict[float, float] = {}  # see `round_s`; each row asks

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take in a step that only verified."""
        self.num_rows = num_rows
        self._rounds_s.clear()
        self.observe(int(self.sizes.run_one(num_rows, num_tokens)), seconds)

    def of_rows(self, num_rows: int, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of steps of so many rows, whose tokens are given in order."""
        return self.estimates(self.sizes.run(num_rows, num_tokens))

    def round_s(self, k: float) -> float:
        """Return the seconds of a step of as many rows as the last, with k draft tokens each."""
        if (seconds := self._rounds_s.get(k)) is None:
            num_tokens = self.num_rows * (1 + k)
            seconds = self.estimate(self.sizes.run_one(self.num_rows, num_tokens))
            self._rounds_s[k] = seconds
        return seconds

    def prompts_s(self, prompts: Sequence[int], num_tokens: int, seconds: float) -> float:
        """Return the seconds that prompts took in a step of `num_tokens` tokens and `seconds`.

        `prompts` are the tokens of each. Other rows take what they would without them.
        """
        if not prompts:
            return 0.0
        return max(0.0, seconds - self.estimate(num_tokens - sum(prompts)))


def _size_of(num_tokens: float) -> int:
    """Return the quarter power of two below a number of tokens, of whose steps one mean is kept."""
    return int(4 * math.log2(num_tokens))
