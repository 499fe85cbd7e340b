"""Work recorded once and repeated by one launch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

Work = Callable[[], None]
Record = Callable[[Work], Work]
"""Makes of `work` what does the same again, on whatever its tensors hold by then.

`work` runs once or more. Everything it reads and writes must stay where it is.
"""


class CudaGraphs:
    """A `Record` by CUDA graphs, which share one stream and the memory of what they allocate.

    So no two may run at once, and what a later one needs must not live in an earlier one's memory.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        # Once without capturing: kernels are compiled, libraries make their workspaces.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only this one's mistakes count.
        with (
            _no_collection(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            work()
        return graph.replay


def replay_seconds(work: Work) -> float:
    """How long recorded work takes the device: the shortest of three times."""
    marks = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(4)
    ]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    times: list[float] = [began.elapsed_time(ended) for began, ended in pairwise(marks)]
    return min(times) * 1e-3


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing is found to be garbage meanwhile: a graph that goes ends the capture of another."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
