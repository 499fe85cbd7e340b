"""Capture work once and repeat it by one launch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batch import Model, PackedBatch
from outrider.engine.events import elapsed_seconds, make_events

CUDA = torch.device("cuda")
Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Returns work that repeats `work` on the contents that its tensors have by then.

A capture first runs `work` as it is. All that `work` reads and writes must stay where it then is.
"""
Precompile = Callable[[Sequence[Work]], None]
"""Runs works in any order, or at once, so that captures find all kernels compiled."""


class CapturableModel(Model, Protocol):
    """A model whose forward can be captured."""

    dtype: torch.dtype

    @property
    def scratch_page(self) -> int:
        """A page that belongs to no sequence."""

    def logits(self, batch: PackedBatch, out: Tensor | None = None) -> Tensor:
        """Return what `forward` returns, in the model's dtype, in `out` if it is given."""


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


def replay_seconds(*works: Work, device: torch.device = CUDA) -> float:
    """Return how long captured works take a device together, the shorter of two times."""
    events = make_events(device, 3)
    events[0].record()
    for event in events[1:]:
        for work in works:
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
