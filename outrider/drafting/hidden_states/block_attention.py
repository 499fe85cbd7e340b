"""Attention of blocks whose tokens see one another, over backends that are causal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from outrider.drafting.graphs.batches import row_starts
from outrider.engine.attention.base import AttentionBackend, AttentionParams, StepAttention
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.batch import PackedBatch
from outrider.engine.kv_cache.pools import LayerPool
from outrider.engine.tree_mask import MAX_TREE_NODES, TreeMask


class BlockAttention:
    """The attention of one forward over blocks, by kind of layer; each is made when it is used.

    All rows of `batch` have the same number of tokens. Those of row i after its first `sizes[i]`
    are padding, which nobody sees.
    """

    def __init__(self, batch: PackedBatch, sizes: Sequence[int], backend: AttentionBackend) -> None:
        self._batch, self._sizes, self._backend = batch, sizes, backend

    def of(self, *, causal: bool, window: int | None) -> StepAttention:
        """Return the attention of layers that are causal or not, with a window or without."""
        if causal:
            return self.causal
        return self._whole if window is None else self._windowed

    @cached_property
    def causal(self) -> StepAttention:
        """A token sees those before it."""
        return self._backend(self._batch)

    @cached_property
    def _whole(self) -> StepAttention:
        on_cpu = self._batch.input_ids.device.type == "cpu"
        if on_cpu and self._batch.query_lens[0] < MAX_TREE_NODES:
            return self._backend(self._masked())
        return _WholeBlocks(self._batch, self._sizes, self._backend)

    @cached_property
    def _windowed(self) -> StepAttention:
        return SdpaAttention(self._masked())  # the window is wider than a block

    def _masked(self) -> PackedBatch:
        """Return the batch with trees of which every node sees all."""
        batch, width = self._batch, self._batch.query_lens[0]
        seen = torch.tensor([(1 << size) - 1 for size in self._sizes]).to(batch.input_ids.device)
        mask = TreeMask(batch.seq_lens - width, seen.repeat_interleave(width))
        return replace(batch, trees=mask)


class _WholeBlocks:
    """Every token of a block sees all of it: to the backend, they are heads of its last token.

    So keys are read once for the whole block, and no mask is needed.
    """

    def __init__(self, batch: PackedBatch, sizes: Sequence[int], backend: AttentionBackend) -> None:
        self.batch = batch
        rows, self._width = len(sizes), batch.query_lens[0]
        device = batch.input_ids.device
        lens = batch.seq_lens
        if any(size < self._width for size in sizes):
            lens = lens - self._width + torch.tensor(sizes, dtype=torch.int32).to(device)
        contexts = zip(batch.context_lens, sizes, strict=True)
        self._inner = backend(
            PackedBatch(
                input_ids=batch.input_ids[:rows],
                positions=lens.long() - 1,
                slot_mapping=batch.slot_mapping[:rows],
                cu_seqlens_q=row_starts(rows, 1, device),
                seq_lens=lens,
                block_table=batch.block_table,
                logits_index=torch.arange(rows, device=device),
                query_lens=(1,) * rows,
                context_lens=tuple([length - self._width + size for length, size in contexts]),
                page_size=batch.page_size,
                recorded=batch.recorded,
            )
        )

    def attend(self, query: Tensor, pool: LayerPool, params: AttentionParams) -> Tensor:
        tokens, kv_heads, group, dim = query.shape
        rows = tokens // self._width
        blocks = query.view(rows, self._width, kv_heads, group, dim).transpose(1, 2)
        # Without a copy where a head has one query, which no kernel reads.
        joined = blocks.reshape(rows, kv_heads, self._width * group, dim).contiguous()
        out = self._inner.attend(joined, pool, params)
        out = out.view(rows, kv_heads, self._width, group, -1).transpose(1, 2)
        return out.reshape(tokens, kv_heads, group, -1)
