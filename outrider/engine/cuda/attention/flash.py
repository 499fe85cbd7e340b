"""FlashAttention-4 over pages."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider.engine.attention.base import AttentionParams, StepAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.cuda.attention.triton import TritonPagedAttention
from outrider.engine.kv_cache.pools import LayerPool

_TILE_QUERIES = 64  # query tokens times heads per key head in one program
_one_at_a_time = threading.Lock()  # a call may compile, at start in several threads


@dataclass(frozen=True, slots=True)
class Flash4Backend:
    """FlashAttention-4, and Triton where splitting the keys is faster.

    On Hopper FlashAttention-4 runs one program per row and key head, so that few long rows leave
    most of the device idle. Steps whose rows do not fill the device go to `TritonPagedAttention`.
    The choice depends on the batch's shape alone, so that a captured graph keeps it.
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

    A CUDA graph can capture it once each kind of layer has run. The first call compiles it for
    head dims, window, softcap, sinks, and whether the longest row's queries fit one tile.
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
        with _one_at_a_time:
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
        return out.view(*query.shape[:3], out.shape[-1])  # type: ignore[no-any-return]
