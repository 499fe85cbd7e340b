"""Attention that believes the tensors of a recorded batch, as kernels on a device do."""

from __future__ import annotations

from dataclasses import replace

from outrider.engine.attention.base import StepAttention
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.batch import PackedBatch


def by_tensors(batch: PackedBatch) -> StepAttention:
    """An `AttentionBackend`: of a recorded batch the numbers on the host are only upper bounds."""
    if not batch.recorded:
        return SdpaAttention(batch)
    query_lens = batch.cu_seqlens_q.diff().tolist()
    rows = [i for i, n in enumerate(query_lens) if n]
    ends = [*batch.cu_seqlens_q[rows].tolist(), len(batch.input_ids)]
    trees = batch.trees and replace(batch.trees, starts=batch.trees.starts[rows])
    return SdpaAttention(
        replace(
            batch,
            trees=trees,
            cu_seqlens_q=batch.cu_seqlens_q.new_tensor(ends),
            seq_lens=batch.seq_lens[rows],
            block_table=batch.block_table[rows],
            query_lens=tuple(query_lens[i] for i in rows),
            context_lens=tuple(batch.seq_lens[rows].tolist()),
            recorded=False,
        )
    )
