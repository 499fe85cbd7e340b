"""FlashAttention-4 over pages."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.engine.attention.base import AttentionParams, StepAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.cuda.attention.triton import SHORT_QUERIES, TritonPagedAttention
from outrider.engine.kv_cache.pools import LayerPool

_one_at_a_time = threading.Lock()  # a call may compile, at start in several threads
# FlashAttention passes what its compiler warns of: nothing that an operator could mend.
warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)


@dataclass(frozen=True, slots=True)
class Flash4Backend:
    """FlashAttention-4 for prompts, and Triton for the rows beside them and for other steps.

    On Hopper FlashAttention-4 gives each row and key head a tile of 128 queries.
    The choice depends on the batch's shape alone, so that a captured graph keeps it.
    """

    capturable: ClassVar[bool] = True

    group: int  # query heads per key head
    multiprocessors: int

    def __call__(self, batch: PackedBatch) -> StepAttention:
        rows = TritonPagedAttention(batch, self.multiprocessors)
        return Flash4Attention(rows, self.group) if rows.has_prompts(self.group) else rows


class Flash4Attention:
    """Implements `StepAttention` with `flash_attn.cute` for prompts.

    A CUDA graph can capture it once each kind of layer has run. The first call compiles it for
    head dims, window, softcap and sinks.
    """

    def __init__(self, rows: TritonPagedAttention, group: int) -> None:
        self.batch, self._rows = rows.batch, rows
        lengths = rows.batch.cu_seqlens_q.diff()
        self._prompt_lens = torch.where(lengths * group > SHORT_QUERIES, lengths, 0)

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        batch = self.batch
        window = params.sliding_window
        with _one_at_a_time:
            out, _ = flash_attn_varlen_func(
                query.flatten(1, 2),
                pool.keys,
                pool.values,
                cu_seqlens_q=batch.cu_seqlens_q,
                seqused_q=self._prompt_lens,
                seqused_k=batch.seq_lens,
                max_seqlen_q=batch.max_query_len,
                page_table=batch.block_table,
                softmax_scale=params.scaling,
                causal=True,
                window_size=(None if window is None else window - 1, None),
                learnable_sink=params.sinks,
                softcap=params.softcap or 0.0,
            )
        whole: Tensor = out.view(*query.shape[:3], out.shape[-1])
        self._rows.attend_short(query, pool, params, whole)
        return whole
