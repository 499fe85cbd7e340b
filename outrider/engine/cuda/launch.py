"""Launch kernels one after another, and time them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PLAIN: dict[str, Any] = {"PDL": False}
_EARLY: dict[str, Any] = {"PDL": True, "launch_pdl": True}


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
    """Return the launch arguments of a kernel with a constant `PDL`, measured on this device.

    With PDL (programmatic dependent launch, from compute capability 9.0) a kernel starts while the
    one before still runs and waits for its results itself. Each of our kernels lets the next start
    at once, and waits before it reads another kernel's results and before it writes. So a
    kernel's end is also the end of all before it.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return _PLAIN
    try:
        early = _early_launches_help()
    except Exception as error:  # plain launches always work
        logger.warning("kernels are launched one after another: %s", error)
        return _PLAIN
    return _EARLY if early else _PLAIN


@torch.inference_mode()
def _early_launches_help() -> bool:
    """Return whether a chain of small dependent products is right and faster with PDL."""
    from outrider.engine.cuda.kernels.gemm import gemv_kernel

    size, count, times_each = 2048, 16, 16
    weights = torch.randn(count, size, size, dtype=torch.bfloat16, device="cuda") * size**-0.5
    states = torch.randn(count + 1, 1, size, dtype=torch.bfloat16, device="cuda")
    results, times = [], []
    for options in (_PLAIN, _EARLY):
        states[1:] = 0.0
        calls = [
            partial(
                gemv_kernel[(size // 4,)],
                states[i],
                weights[i],
                states[i],
                states[i + 1],
                1,
                size,
                size,
                0.0,
                False,
                False,
                False,
                1,
                4,
                size,
                num_warps=4,
                **options,
            )
            for i in range(count)
        ]
        times.append(graph_us(calls * times_each))
        results.append(states.clone())
    equal = torch.equal(*results)
    logger.info(
        "a chain of small products: %.1f us each, %.1f us with early launches%s",
        *times,
        "" if equal else ", and wrong",
    )
    return equal and times[1] < times[0]
