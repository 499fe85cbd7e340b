"""Attention that reads keys and values in their pages, by a compiled kernel."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.attention.base import AttentionBackend, AttentionParams
from outrider.engine.batch import PackedBatch
from outrider.engine.cpu import attend
from outrider.engine.cpu.team import Kernel
from outrider.engine.kv_cache.pools import LayerPool

_TEAM_SIZE = 1 << 10  # scores per call from which a team of threads is faster


class NumbaAttention:
    """Implements `StepAttention` over a `HeadMajorPool` whose keys are as wide as its values.

    The width is a multiple of `attend.DIM_STEP`. Softcap and sinks are not supported.
    """

    def __init__(self, batch: PackedBatch, kernel: Kernel) -> None:
        self.batch = batch
        self._kernel = kernel
        self._blocks, self._pairs = _blocks(batch)
        self._compact: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def backend(dtype: torch.dtype) -> AttentionBackend:
        """Compile the kernel, or load it from the cache."""
        kernel = Kernel(attend.attend, "16qd", dtype)
        return lambda batch: NumbaAttention(batch, kernel)

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        tokens, kv_heads, group, dim = query.shape
        assert query.stride()[1:] == (group * dim, dim, 1)
        batch = self.batch
        longest = batch.max_context_len
        keys, values, table = pool.keys, pool.values, batch.block_table
        if pool.scales is not None:
            slots, table = self._own_pages()
            keys, values = pool.gather(slots)
        out = query.new_empty(tokens, kv_heads, group, dim)
        self._kernel(
            self._pairs * kv_heads * group >= _TEAM_SIZE,
            len(self._blocks) * kv_heads,
            self._blocks.ctypes.data,
            query.data_ptr(),
            out.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            table.data_ptr(),
            query.stride(0),
            longest,
            kv_heads,
            group,
            dim,
            keys.shape[1],
            table.shape[1],
            batch.page_size,
            min(params.sliding_window or longest, longest),
            0 if batch.trees is None else batch.trees.visible.data_ptr(),
            params.scaling,
        )
        return out

    def slide(self, by: int) -> None:
        """Move all tokens, the first of a tree and those that see one another by as many slots."""
        self._blocks[:, 3:] += by

    def _own_pages(self) -> tuple[Tensor, Tensor]:
        """Return the slots of the step's pages, and its block table of these pages alone."""
        if self._compact is None:
            size = self.batch.page_size
            pages, table = torch.unique(self.batch.block_table, return_inverse=True)
            slots = pages.long()[:, None] * size + torch.arange(size)
            self._compact = slots.flatten(), table.to(torch.int32)
        return self._compact


def _blocks(batch: PackedBatch) -> tuple[NDArray[np.int64], int]:
    """Return the kernel's blocks [n, 6] and the number of query-key pairs."""
    blocks = []
    pairs = first = 0
    trees = batch.context_lens if batch.trees is None else batch.trees.starts.tolist()
    rows = zip(batch.query_lens, batch.context_lens, trees, strict=True)
    for row, (count, context, tree) in enumerate(rows):
        pairs += count * context
        start = context - count
        for done in range(0, count, attend.QUERY_BLOCK):
            size = min(attend.QUERY_BLOCK, count - done)
            end = context if tree < context else start + done + size
            blocks.append((row, first + done, size, start + done, tree, end))
        first += count
    return np.array(blocks, np.int64), pairs
