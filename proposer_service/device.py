"""Drafting on a CUDA device: the loops that are recorded at start."""

from __future__ import annotations

import time

import torch

from outrider.drafting.graph_chains import GraphChains, make_shapes
from outrider.drafting.triton_draws import TritonDraws
from outrider.engine.cuda.graphs import CudaGraphs
from outrider.engine.paged_model import PagedModel
from outrider.errors import ConfigError
from outrider.rpc.runtime import progress

_MAX_ROWS = 128
"""Of one loop; more sessions take several."""
_QUERY_LENS = (2, 8)
"""Tokens to catch up: after most rounds, and after some that went on without a draft."""
_NUM_TOKENS = (1, 2, 3, 4, 6, 8, 12)


def record_loops(
    model: PagedModel, *, max_sessions: int, max_draft_tokens: int
) -> GraphChains | None:
    """The recorded draft loops, or None (said aloud) if the attention cannot be recorded.

    Raises `ConfigError` if they do not fit into the device's memory.
    """
    if not model.capturable:
        progress("proposer", "this attention backend cannot be recorded: every forward is launched")
        return None
    began = time.perf_counter()
    shapes = [
        shape
        for cut in (False, True)
        for shape in make_shapes(
            max_rows=min(max_sessions, _MAX_ROWS),
            query_lens=_QUERY_LENS,
            num_tokens=[*(k for k in _NUM_TOKENS if k < max_draft_tokens), max_draft_tokens],
            cut=cut,
        )
    ]

    def on_progress(done: int, total: int) -> None:
        if done * 10 // total > (done - 1) * 10 // total:
            seconds = time.perf_counter() - began
            progress("proposer", f"recorded {done} of {total} draft loops ({seconds:.1f} s)")

    try:
        return GraphChains(
            model, shapes, record=CudaGraphs(), draws=TritonDraws(), on_progress=on_progress
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "The recorded draft loops do not fit into the device's memory: lower "
            "--kv-cache-memory, --max-draft-tokens or --max-sessions."
        ) from error
