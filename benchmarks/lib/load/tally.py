"""Sum up a load's requests, in memory that does not grow with their number."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

now = time.perf_counter  # the clock of all times: uvloop's own has whole milliseconds
_PER_OCTAVE: Final = 32
"""Buckets per doubling: a quantile is exact to 1.1 %."""
_LOWEST_S: Final = 1e-6
_BUCKETS: Final = 30 * _PER_OCTAVE  # to a thousand seconds


class Gaps:
    """A histogram of times between events, in logarithmic buckets."""

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * _BUCKETS))
        self.begun = 0  # streams that have an event
        self.count = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        octaves = math.log2(seconds / _LOWEST_S) if seconds > _LOWEST_S else 0.0
        self._counts[min(int(octaves * _PER_OCTAVE), _BUCKETS - 1)] += 1

    def quantile(self, part: float) -> float | None:
        """Return the time in seconds that `part` of the gaps do not exceed; None without gaps."""
        left = part * self.count
        for bucket, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return _LOWEST_S * float(2.0 ** ((bucket + 0.5) / _PER_OCTAVE))
        return None


@dataclass(frozen=True, slots=True)
class Bound:
    """The latency within which an answer counts as good."""

    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class Stream:
    """One request's times (seconds) and counts, as they come."""

    due: float
    first: float | None = None
    last: float = 0.0
    messages: int = 0
    tokens: int | None = None  # as the server counts them, if it does

    def seen(self, at: float, gaps: Gaps) -> None:
        """Count an event with text."""
        if self.first is None:
            self.first = at
            gaps.begun += 1
        else:
            gaps.add(at - self.last)
        self.last = at
        self.messages += 1


@dataclass
class Tally:
    """The requests of a load that have ended; times in seconds."""

    bound: Bound
    gaps: Gaps = field(default_factory=Gaps)
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    total: array[float] = field(default_factory=lambda: array("d"))
    failures: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    tokens: int = 0
    closed_at: float = math.inf  # then no request began any more
    open_s: float = 0.0  # time until then
    steady_tokens: float = 0.0  # that had come by then, as if each stream's came evenly
    good: int = 0
    most_open: int = 0
    lag_s: float = 0.0
    """The longest time between a request's arrival and the generator's turn to send it."""

    def ended(self, stream: Stream) -> None:
        """Take in a request that was answered in full."""
        tokens = stream.messages if stream.tokens is None else stream.tokens
        self.messages += stream.messages
        self.tokens += tokens
        if stream.first is None:
            self.failures["no text"] += 1
            return
        came = (self.closed_at - stream.first) / (stream.last - stream.first or 1e-9)
        self.steady_tokens += tokens * max(0.0, min(1.0, came))
        ttft, tpot = stream.first - stream.due, 0.0
        if tokens > 1:
            tpot = (stream.last - stream.first) / (tokens - 1)
            self.tpot.append(tpot)
        self.ttft.append(ttft)
        self.total.append(now() - stream.due)
        self.good += ttft <= self.bound.ttft_s and tpot <= self.bound.tpot_s

    def failed(self, stream: Stream, kind: str) -> None:
        """Take in a request that was not; what it streamed until then counts as messages."""
        self.messages += stream.messages
        self.failures[kind] += 1

    def numbers(self, seconds: float) -> dict[str, Any]:
        """Return the results of a load that lasted so long, times in milliseconds."""
        answered = len(self.ttft)
        tpot = _quantiles(self.tpot)
        slowest, median = tpot["max"], tpot["p50"]
        return {
            "seconds": seconds,
            "answered": answered,
            "failures": dict(sorted(self.failures.items())),
            "requests_per_s": answered / seconds,
            "goodput_per_s": self.good / seconds,
            "good": self.good / max(1, answered + self.failures.total()),
            "messages": self.messages,
            "messages_per_s": self.messages / seconds,
            "tokens_per_s": self.tokens / seconds,
            "steady_tokens_per_s": self.steady_tokens / (self.open_s or seconds) or None,
            "ttft_ms": _quantiles(self.ttft),
            "inter_token_ms": {
                name: _ms(self.gaps.quantile(part)) for name, part in _QUANTILES.items()
            },
            "tpot_ms": tpot,
            "slowest_to_median": slowest / median if slowest and median else None,
            "total_ms": _quantiles(self.total),
            "most_open": self.most_open,
            "lag_ms": self.lag_s * 1e3,
        }


_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    ranks = {name: math.ceil(part * len(ordered)) - 1 for name, part in _QUANTILES.items()}
    return {name: _ms(ordered[rank]) if ordered else None for name, rank in ranks.items()}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
