"""The estimator of times and shares: a moving average."""

from __future__ import annotations

OUTLIER = 4.0  # means: a time of more is an accident, as a second instead of milliseconds


class Average:
    """Exponentially weighted mean of about the last `window` values, and their mean deviation.

    Its first values count alike, unless it begins at `mean` as if that were long known. `weight` is
    how much it has taken in, fading.
    """

    __slots__ = ("_kept", "deviation", "mean", "weight")

    def __init__(self, window: float = 8.0, mean: float | None = None) -> None:
        self._kept = 1.0 - 1.0 / window
        self.weight = 0.0 if mean is None else window
        self.mean, self.deviation = mean or 0.0, 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Take in one measurement."""
        self.weight = self._kept * self.weight + weight
        if weight:
            share = weight / self.weight
            self.deviation += share * (abs(value - self.mean) - self.deviation)
            self.mean += share * (value - self.mean)

    def add_time(self, seconds: float) -> None:
        """Take in a time, an outlier as that many means.

        A mean that a first call or a compilation began is such an outlier, and left at once.
        """
        if OUTLIER * seconds < self.mean:
            self.weight = 0.0
        self.add(min(seconds, OUTLIER * self.mean) if self.weight and self.mean else seconds)
