"""Work that is captured for some sizes, the buckets, and replayed in the smallest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

B = TypeVar("B")
T = TypeVar("T")


class CapturedBuckets(Generic[B, T]):
    """Buckets in the order of `cost`, the cheapest first, with what `capture` made of each.

    The most expensive bucket is captured first, so that its memory serves the others. A bucket of
    which `capture` makes None is left out.
    """

    def __init__(
        self, buckets: Iterable[B], capture: Callable[[B], T | None], cost: Callable[[B], Any]
    ) -> None:
        captured: dict[B, T] = {}
        for bucket in sorted(set(buckets), key=cost, reverse=True):
            work = capture(bucket)
            if work is not None:
                captured[bucket] = work
        self._captured = dict(reversed(captured.items()))

    def __iter__(self) -> Iterator[B]:
        return iter(self._captured)

    def __getitem__(self, bucket: B) -> T:
        return self._captured[bucket]

    def find(self, fits: Callable[[B], bool]) -> B | None:
        """Return the cheapest bucket that fits, or None."""
        return next((bucket for bucket in self._captured if fits(bucket)), None)
