"""Attention over pages in Triton, in any dtype, with softcap, sinks and trees.

Few rows of long context do not fill a GPU with one program per row and key head. So their keys are
split among several programs, which FlashAttention-4 does not do on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
from torch import Tensor

from outrider.engine.attention.base import AttentionParams
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.cuda.kernels.attention import combine_splits_kernel, paged_attention_kernel
from outrider.engine.cuda.launch import launch_options
from outrider.engine.kv_cache.pools import LayerPool, PageMajorPool
from outrider.engine.tree_mask import MAX_TREE_NODES

_MAX_SPLITS = 16
_MAX_QUERIES = 64  # query tokens times heads per key head in one tile
_FLOAT8_QUERIES = 128  # likewise in tiles of prompts, which convert all keys and values
SHORT_QUERIES = 32  # likewise of a row that is no prompt where others may be
_MAX_JOINED = 16  # likewise in a tile of rows that share pages
_SHARED_BYTES = 64 * 1024  # for keys and values in flight, per program


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """An `AttentionBackend`."""

    capturable: ClassVar[bool] = True

    multiprocessors: int

    def __call__(self, batch: PackedBatch) -> TritonPagedAttention:
        return TritonPagedAttention(batch, self.multiprocessors)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a program reads its keys, and how many programs share a multiprocessor."""

    keys: int  # per block
    warps: int
    programs: int
    blocks: int = 3  # in flight at most


def _float8_tiling(block_m: int, *, many: bool) -> _Tiling:
    """Return the fastest tiling on an H200 for float8 keys and values of at most 128 numbers.

    `many`: there is a program for every multiprocessor without splits.
    """
    if block_m == _FLOAT8_QUERIES:
        return _Tiling(64, 8, 1)
    return _Tiling(64, 2, 4) if many and block_m <= 16 else _Tiling(128, 4, 2)


def _tiling(block_m: int, dim: int, *, alone: bool, joined: bool) -> _Tiling:
    """Return the fastest tiling on an H200 for tiles of `block_m` queries.

    `alone`: every program has a multiprocessor to itself. `joined`: a tile has several rows.
    """
    if joined:
        return _Tiling(64, 2 if dim <= 64 else 4, 2)
    if block_m > 16:
        few_warps = block_m == 32 and dim <= 128 and not alone
        return _Tiling(32 if alone else 64, 2 if few_warps else 4, 2)
    if alone:
        return _Tiling(32, 8, 1)
    if dim <= 64:
        return _Tiling(64, 2, 2)
    return _Tiling(32, 1, 4)  # one warp needs no barrier


class TritonPagedAttention:
    """Implements `StepAttention` over page-major pools. A CUDA graph can capture it.

    The number of splits depends on the batch's shape, not on its lengths. Where rows may be
    prompts, these are attended in tiles, and the short rows as in steps without prompts.
    """

    def __init__(self, batch: PackedBatch, multiprocessors: int) -> None:
        self.batch = batch
        self._rows = len(batch.query_lens)
        self._max_query_len = batch.max_query_len
        self._multiprocessors = multiprocessors

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        if self._too_wide(params):
            return SdpaAttention(self.batch).attend(query, pool, params)
        out = query.new_empty(*query.shape[:3], pool.shape[2])
        if self.has_prompts(query.shape[2]):
            self._launch(query, None, pool, params, out, tiled=True)
        self._launch(query, None, pool, params, out)
        return out

    def attend_short(
        self, query: Tensor, pool: LayerPool, params: AttentionParams, out: Tensor
    ) -> None:
        """Write to `out` what `attend` returns for rows of at most `SHORT_QUERIES`."""
        self._launch(query, None, pool, params, out)

    def has_prompts(self, group: int) -> bool:
        """Return whether rows may be too long for one tile."""
        return self._max_query_len * group > _MAX_QUERIES

    def takes_new(self, group: int, params: AttentionParams) -> bool:
        """Return whether `attend_new` supports so many query heads per key head."""
        return not self.has_prompts(group) and not self._too_wide(params)

    def attend_new(
        self, query: Tensor, rope: Tensor, pool: LayerPool, params: AttentionParams
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, and attend, in one launch.

        query [tokens, kv_heads, group, dim] is the first part of rows in which the new keys and
        values [2, kv_heads, dim] follow; rope as for `LlamaOps.rotate_and_store`.
        """
        out = query.new_empty(*query.shape[:3], pool.shape[2])
        self._launch(query, rope, pool, params, out)
        return out

    def _too_wide(self, params: AttentionParams) -> bool:
        """Return whether a node's ancestors may be outside the window."""
        window = params.sliding_window or MAX_TREE_NODES
        return self.batch.trees is not None and window < MAX_TREE_NODES

    def _joined(self, group: int, params: AttentionParams) -> int:
        """Return the rows that a tile of queries may join, a power of two."""
        shared, trees = self.batch.shared, self.batch.trees
        if shared is None or trees is not None or params.sliding_window is not None:
            return 1
        most = max(1, _MAX_JOINED // (self._max_query_len * group))
        return 1 << most.bit_length() - 1

    def _launch(
        self,
        query: Tensor,
        rope: Tensor | None,
        pool: LayerPool,
        params: AttentionParams,
        out: Tensor,
        *,
        tiled: bool = False,
    ) -> None:
        """Write the outputs of rows that fit one tile, or if `tiled` of the others."""
        assert isinstance(pool, PageMajorPool)
        assert query.stride()[1:] == (query.shape[2] * query.shape[3], query.shape[3], 1)
        batch, trees, shared = self.batch, self.batch.trees, self.batch.shared
        tokens, kv_heads, group, dim = query.shape
        value_dim = pool.shape[2]
        prompts = self.has_prompts(group)
        joined = 1 if prompts else self._joined(group, params)
        narrow = max(dim, value_dim) <= 128 and query.element_size() == 2 and joined == 1
        queries = joined * self._max_query_len * group
        if prompts:
            most = _FLOAT8_QUERIES if narrow and pool.scales is not None else _MAX_QUERIES
            queries = most if tiled else SHORT_QUERIES
        block_m = max(16, triton.next_power_of_2(queries))
        pairs = pool.scales is not None and not tiled  # whose tiles wait for conversions alone
        least = 32 if pairs else 16  # tensor cores take 16 columns, even or odd ones
        block_dim = max(least, triton.next_power_of_2(dim))
        block_value_dim = max(least, triton.next_power_of_2(value_dim))
        programs = triton.cdiv(self._rows, joined) * kv_heads
        alone = programs * _MAX_SPLITS <= self._multiprocessors and not prompts
        tiling = _tiling(block_m, max(dim, value_dim), alone=alone, joined=joined > 1)
        # The others are not among what was measured.
        if pool.scales is not None and narrow and block_m in (16, 32, _FLOAT8_QUERIES):
            tiling = _float8_tiling(block_m, many=programs >= self._multiprocessors)
        most = tiling.programs * self._multiprocessors
        splits = 1 if prompts else _splits(programs, most)
        partial, lse = out, out
        if splits > 1:
            heads = tokens * kv_heads * group
            partial = query.new_empty((heads, splits, value_dim), dtype=torch.float32)
            lse = query.new_empty((heads, splits), dtype=torch.float32)
        block_bytes = tiling.keys * (block_dim + block_value_dim) * pool.keys.element_size()
        buffers = min(tiling.blocks, _SHARED_BYTES // block_bytes)
        # Loads of the page table for each key take every second one of Triton's stages.
        stages = buffers if tiled and batch.page_size % tiling.keys == 0 else 2 * buffers
        grid = (splits, kv_heads, self._rows)
        if tiled:
            # A row of more than SHORT_QUERIES has at most a tile for each SHORT_QUERIES of them.
            most = min(tokens * group // block_m + self._rows, tokens * group // SHORT_QUERIES)
            grid = (most, kv_heads, 1)
            if most == 0:
                return
        unused = batch.seq_lens  # in place of tensors that the kernel does not read
        paged_attention_kernel[grid](
            query_ptr=query,
            rope_ptr=unused if rope is None else rope,
            slots_ptr=batch.slot_mapping,
            keys_ptr=pool.keys,
            values_ptr=pool.values,
            scales_ptr=unused if pool.scales is None else pool.scales.view(torch.int32),
            table_ptr=batch.block_table,
            seq_lens_ptr=batch.seq_lens,
            cu_seqlens_ptr=batch.cu_seqlens_q,
            sinks_ptr=unused if params.sinks is None else params.sinks,
            trees_ptr=unused if trees is None else trees.starts,
            visible_ptr=unused if trees is None else trees.visible,
            positions_ptr=batch.positions,
            places_ptr=unused if shared is None else shared.places,
            shared_ptr=unused if shared is None else shared.pages,
            out_ptr=partial,
            lse_ptr=lse,
            query_stride=query.stride(0),
            table_stride=batch.block_table.stride(0),
            num_rows=self._rows,
            splits=splits,
            window=params.sliding_window or 0,
            scale=params.scaling,
            softcap=params.softcap or 0.0,
            GROUP=group,
            DIM=dim,
            VALUE_DIM=value_dim,
            PAGE_SIZE=batch.page_size,
            HAS_WINDOW=params.sliding_window is not None,
            HAS_SOFTCAP=params.softcap is not None,
            HAS_SINKS=params.sinks is not None,
            HAS_TREES=trees is not None,
            FLOAT8=pool.scales is not None,
            PAIRS=pairs,
            ASM=query.is_cuda,
            NEW=rope is not None,
            BLOCK_NEW=min(16, block_m // triton.next_power_of_2(group)),
            ROWS=joined,
            SHORT=SHORT_QUERIES if tiled else 0,
            SPLIT=splits > 1,
            BLOCK_M=block_m,
            BLOCK_N=tiling.keys,
            BLOCK_DIM=block_dim,
            BLOCK_VALUE_DIM=block_value_dim,
            STAGES=stages + 1 if buffers > 1 else 1,
            num_warps=tiling.warps,
            **launch_options(),
        )
        if splits > 1:
            widths = (value_dim, splits, block_value_dim)
            combine_splits_kernel[(len(lse),)](
                partial, lse, out, *widths, num_warps=1, **launch_options()
            )


def _splits(programs: int, most: int) -> int:
    """Return the programs per tile, a power of two that brings `programs` close to `most`.

    It does not depend on the context's length, so that a captured step keeps it.
    """
    splits = 1
    while splits * 2 * programs <= most and splits < _MAX_SPLITS:
        splits *= 2
    return splits
