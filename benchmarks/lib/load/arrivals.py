"""When requests arrive, whatever became of those before: an open loop."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds, `rate` a second on average, without memory."""
    draw = random.Random(seed)
    at = 0.0
    while True:
        at += draw.expovariate(rate)
        yield at


def bursts(rate: float, size: int, seed: int) -> Iterator[float]:
    """Yield arrival times of bursts of `size` at once, which come as `poisson` does.

    The mean rate of requests is `rate`, too.
    """
    for at in poisson(rate / size, seed):
        for _ in range(size):
            yield at
