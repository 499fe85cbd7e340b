"""FlashAttention over pages: version 4 (`flash-attn-4`), and 3 and 2 where they are installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention.base import AttentionParams, StepAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.cuda.attention.triton import TritonPagedAttention
from outrider.engine.kv_cache.pools import LayerPool

_TILE_QUERIES = (
    64  # query tokens times heads per key head that one program takes; see Flash4Backend
)


@dataclass(frozen=True, slots=True)
class Flash4Backend:
    """FlashAttention-4, and Triton where dividing the keys pays.

    On Hopper FlashAttention-4 runs one program per row and key head, whatever the context: a
    single long row leaves most of the device idle. So steps whose rows do not fill it go to
    `TritonPagedAttention`, by the batch's shape alone, so that a captured graph keeps its choice.
    (H200, 8 key heads, K = 4: 8.9 against 11.9 us at 1 row of 512 keys, 14 against 55 at 4,096;
    25 against 29 us at 32 rows of 512, but 142 against 134 at 4,096.)
    """

    capturable: ClassVar[bool] = True

    num_kv_heads: int
    group: int  # query heads per key head
    multiprocessors: int

    def __call__(self, batch: PackedBatch) -> StepAttention:
        rows = len(batch.query_lens)
        short = batch.max_query_len * self.group <= _TILE_QUERIES
        if short and rows * self.num_kv_heads <= 2 * self.multiprocessors:
            return TritonPagedAttention(batch, self.multiprocessors)
        return Flash4Attention(batch)


class Flash4Attention:
    """Implements `StepAttention` with `flash_attn.cute`.

    Safe to capture in a CUDA graph once each kind of layer has run: the first call compiles it,
    for head dims, window, softcap, sinks, and whether the longest row's queries fit one tile.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch
        self._max_query_len = batch.max_query_len

    @property
    def batch(self) -> PackedBatch:
        return self._batch

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        batch = self._batch
        window = params.sliding_window
        out, _ = flash_attn_varlen_func(
            query.flatten(1, 2),
            pool.keys,
            pool.values,
            cu_seqlens_q=batch.cu_seqlens_q,
            seqused_k=batch.seq_lens,
            max_seqlen_q=self._max_query_len,
            page_table=batch.block_table,
            softmax_scale=params.scaling,
            causal=True,
            window_size=(None if window is None else window - 1, None),
            learnable_sink=params.sinks,
            softcap=params.softcap or 0.0,
        )
        return _grouped(out, query)


class Flash3Attention:
    """Implements `StepAttention` with the `flash_attn_interface` of FlashAttention-3."""

    capturable: ClassVar[bool] = True

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch
        self._max_query_len = batch.max_query_len

    @property
    def batch(self) -> PackedBatch:
        return self._batch

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        from flash_attn_interface import flash_attn_with_kvcache

        batch = self._batch
        out = flash_attn_with_kvcache(
            query.flatten(1, 2),
            pool.keys,
            pool.values,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=self._max_query_len,
            softmax_scale=params.scaling,
            causal=True,
            window_size=_window(params),
            softcap=params.softcap or 0.0,
        )
        return _grouped(out, query)


class Flash2Attention:
    """Implements `StepAttention` with `flash_attn` 2; its pages are multiples of 256 tokens."""

    capturable: ClassVar[bool] = True

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch
        self._max_query_len = batch.max_query_len
        self._max_seq_len = batch.block_table.shape[1] * batch.page_size
        self._cu_seqlens_k = F.pad(batch.seq_lens.cumsum(0, dtype=batch.seq_lens.dtype), (1, 0))

    @property
    def batch(self) -> PackedBatch:
        return self._batch

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        batch = self._batch
        out = flash_attn_varlen_func(
            query.flatten(1, 2),
            pool.keys,
            pool.values,
            batch.cu_seqlens_q,
            self._cu_seqlens_k,
            self._max_query_len,
            self._max_seq_len,
            softmax_scale=params.scaling,
            causal=True,
            window_size=_window(params),
            softcap=params.softcap or 0.0,
            block_table=batch.block_table,
        )
        return _grouped(out, query)


def _window(params: AttentionParams) -> tuple[int, int]:
    """Keys to the left and right of a query, itself not counted; -1: all."""
    return (-1 if params.sliding_window is None else params.sliding_window - 1, 0)


def _grouped(out: Tensor, query: Tensor) -> Tensor:
    """[tokens, heads, dim] to [tokens, kv_heads, group, dim]."""
    return out.view(*query.shape[:3], out.shape[-1])
