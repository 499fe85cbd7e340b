"""Attention over pages in Triton: needs nothing but torch, any dtype, softcap and sinks included.

Few rows of long context do not fill a GPU with one program per row and key head; here their keys
are divided among several programs, which FlashAttention-4 does not do on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
from torch import Tensor

from outrider.engine.attention import AttentionParams
from outrider.engine.batch import PackedBatch
from outrider.engine.cuda.kernels.attention import combine_splits_kernel, paged_attention_kernel
from outrider.engine.cuda.launch import launch_options
from outrider.engine.kv_cache import LayerPool, PageMajorPool
from outrider.engine.sdpa import SdpaAttention
from outrider.engine.tree_mask import MAX_TREE_NODES

_MAX_SPLITS = 16
_MAX_QUERIES = 64  # query tokens times heads per key head in one tile
_KEYS = 64  # per block
_SHARED_BYTES = 64 * 1024  # for keys and values in flight, per program


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """An `AttentionBackend`."""

    capturable: ClassVar[bool] = True

    programs: int  # that the device runs at once

    def __call__(self, batch: PackedBatch) -> TritonPagedAttention:
        return TritonPagedAttention(batch, self.programs)


class TritonPagedAttention:
    """Implements `StepAttention` over page-major pools. Safe to capture in a CUDA graph.

    `programs` is how many programs should run at once. A captured graph keeps its number of
    splits: it depends on the batch's shape, not on its lengths.
    """

    def __init__(self, batch: PackedBatch, programs: int) -> None:
        self._batch = batch
        self._rows = len(batch.query_lens)
        self._max_query_len = batch.max_query_len
        self._programs = programs

    @property
    def batch(self) -> PackedBatch:
        return self._batch

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        assert isinstance(pool, PageMajorPool)
        assert query.stride()[1:] == (query.shape[2] * query.shape[3], query.shape[3], 1)
        batch, trees = self._batch, self._batch.trees
        if trees is not None and (params.sliding_window or MAX_TREE_NODES) < MAX_TREE_NODES:
            return SdpaAttention(batch).attend(query, pool, params)  # an ancestor may be too far
        tokens, kv_heads, group, dim = query.shape
        value_dim = pool.shape[2]
        block_m = min(_MAX_QUERIES, max(16, triton.next_power_of_2(self._max_query_len * group)))
        tiles = triton.cdiv(self._max_query_len * group, block_m)
        block_dim = max(16, triton.next_power_of_2(dim))
        block_value_dim = max(16, triton.next_power_of_2(value_dim))
        # Prompts, of which there are many lengths, are compiled for once: tiles enough they have.
        splits = self._splits(self._rows * kv_heads) if tiles == 1 else 1
        out = query.new_empty(tokens, kv_heads, group, value_dim)
        partial, lse = out, out
        if splits > 1:
            heads = tokens * kv_heads * group
            partial = query.new_empty((heads, splits, value_dim), dtype=torch.float32)
            lse = query.new_empty((heads, splits), dtype=torch.float32)
        block_bytes = _KEYS * (block_dim + block_value_dim) * query.element_size()
        # Triton's stages: the page table's loads take every second one.
        buffers = min(3, _SHARED_BYTES // block_bytes)
        paged_attention_kernel[(tiles * splits, kv_heads, self._rows)](
            query,
            pool.keys,
            pool.values,
            batch.block_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            out if params.sinks is None else params.sinks,
            batch.seq_lens if trees is None else trees.starts,
            batch.positions if trees is None else trees.visible,
            batch.positions,
            partial,
            lse,
            query.stride(0),
            batch.block_table.stride(0),
            params.sliding_window or 0,
            params.scaling,
            params.softcap or 0.0,
            group,
            dim,
            value_dim,
            batch.page_size,
            params.sliding_window is not None,
            params.softcap is not None,
            params.sinks is not None,
            trees is not None,
            splits,
            block_m,
            _KEYS,
            block_dim,
            block_value_dim,
            2 * buffers + 1 if buffers > 1 else 1,
            num_warps=4,
            **launch_options(),
        )
        if splits > 1:
            combine_splits_kernel[(len(lse),)](
                partial,
                lse,
                out,
                value_dim,
                splits,
                block_value_dim,
                num_warps=1,
                **launch_options(),
            )
        return out

    def _splits(self, programs: int) -> int:
        """Programs per tile: a power of two that fills the device.

        Not of the context's length, so that few kernels are ever compiled: idle programs are cheap.
        """
        splits = 1
        while splits * 2 * programs <= self._programs and splits < _MAX_SPLITS:
            splits *= 2
        return splits
