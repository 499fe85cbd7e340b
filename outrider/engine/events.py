"""Moments of a device's work, and the times between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch


class HostEvent:
    """An event, as CUDA has them, of a device that runs each operation at once."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._at - self._at) * 1e3


Event = torch.cuda.Event | HostEvent


def make_events(device: torch.device, count: int) -> list[Event]:
    """Return events that note moments of the device's current stream."""
    if device.type != "cuda":
        return [HostEvent() for _ in range(count)]
    return [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(count)
    ]


def elapsed_seconds(events: Sequence[Event]) -> list[float]:
    """Wait for the last event; return the seconds between each two that follow one another."""
    events[-1].synchronize()
    return [
        began.elapsed_time(ended) * 1e-3  # type: ignore[arg-type]
        for began, ended in pairwise(events)
    ]
