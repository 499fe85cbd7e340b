"""Launch kernels one after another, and time them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch


def graph_us(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Return the microseconds per call in the fastest of some replays of all calls in a row.

    Replays are enqueued while the ones before run, so that the host's time does not count. The
    fastest replay is the one that other processes on the device disturb least.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    marks = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(repeats + 1)
    ]
    for mark in marks:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    times: list[float] = [began.elapsed_time(ended) for began, ended in pairwise(marks)]
    return min(times) * 1e3 / len(calls)


def row_warps(block: int) -> int:
    """Return the warps of a program that holds a row of so many numbers, 16 a thread."""
    return max(1, min(16, block // 512))


@cache
def launch_options() -> dict[str, Any]:
    """Return the launch arguments of a kernel with a constant `PDL`.

    With PDL (programmatic dependent launch, from compute capability 9.0) a kernel starts while the
    one before still runs and waits for its results itself. Each of our kernels lets the next start
    at once, and waits before it reads another kernel's results and before it writes. So a
    kernel's end is also the end of all before it.
    """
    early = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
