"""Capture work once and repeat it by one launch."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Returns work that repeats `work` on the contents that its tensors have by then.

A capture runs `work` once or more. All that `work` reads and writes must stay where it is.
"""
Precompile = Callable[[Sequence[Work]], None]
"""Runs works in any order, or at once, so that captures find all kernels compiled."""


class CudaGraphs:
    """`Capture` by CUDA graphs, which share a stream and the memory that they allocate.

    No two graphs may run at once. A graph must not need the memory of an earlier one.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        # The first run is eager: it compiles kernels and makes the libraries' workspaces.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, so only this thread's mistakes count.
        with (
            _no_collection(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            work()
        return graph.replay


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


def replay_seconds(work: Work) -> float:
    """Return how long captured work takes a CUDA device, the shorter of two times."""
    events = make_events(torch.device("cuda"), 3)
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    return min(elapsed_seconds(events))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: a graph that is destroyed ends the capture of another."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
