"""Inputs of captured forwards over rows of any lengths.

A bucket is T tokens in R rows. One more row is padding: it has the tokens that are missing, which
write to the scratch page. Rows that are missing are empty and lie behind it. Steps with draft trees
have buckets of their own, whose attention also reads which nodes descend from which.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.graphs.staging import PageLayout, Staging
from outrider.engine.tree_mask import TreeMask

_TOKENS = (*range(64, 1024, 64), *range(1024, 2049, 128))
"""Sizes of which a launch of all kernels takes longer than the forward."""
_TREE_TOKENS = tuple(range(128, 1025, 128))
"""Likewise with trees, which few steps with prompts hold."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, order=True)
class PrefillBucket:
    """The size of a captured forward, without its padding row."""

    tokens: int
    rows: int
    trees: bool = False  # rows may hold trees


def make_prefill_buckets(
    max_tokens: int, max_rows: int, *, trees: bool = False
) -> list[PrefillBucket]:
    """Return buckets of up to `max_rows` rows and, where a capture pays, `max_tokens` tokens.

    With `trees`, buckets for these come first.
    """
    kinds = ((_TREE_TOKENS, True), (_TOKENS, False)) if trees else ((_TOKENS, False),)
    return [
        PrefillBucket(t, min(max_rows, t), with_trees)
        for sizes, with_trees in kinds
        for t in sizes[: bisect_left(sizes, max_tokens) + 1]
    ]


class PrefillInputs:
    """Staging of a forward's inputs, shared by all buckets."""

    def __init__(self, buckets: Sequence[PrefillBucket], layout: PageLayout) -> None:
        tokens = max(bucket.tokens for bucket in buckets)
        rows = max(bucket.rows for bucket in buckets) + 1
        self._layout = layout
        self._longest = max(layout.max_model_len, tokens)  # the padding row may exceed any text
        trees: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "tree_starts": (torch.int32, (rows,)),
            "visible": (torch.int64, (tokens,)),
        }
        self._staging = Staging(
            {
                "input_ids": (torch.int64, (tokens,)),
                "positions": (torch.int64, (tokens,)),
                "slots": (torch.int64, (tokens,)),
                "cu_seqlens": (torch.int32, (rows + 1,)),
                "seq_lens": (torch.int32, (rows,)),
                **(trees if any(bucket.trees for bucket in buckets) else {}),
                "block_table": (torch.int32, (rows, -(-self._longest // layout.page_size))),
            },
            layout.device,
        )

    def batch(self, bucket: PrefillBucket) -> PackedBatch:
        """Return a bucket's batch, without logits: views of the device's buffer."""
        device, tokens, rows = self._staging.device, bucket.tokens, bucket.rows + 1
        trees = None
        if bucket.trees:
            trees = TreeMask(device("tree_starts")[:rows], device("visible")[:tokens])
        return PackedBatch(
            input_ids=device("input_ids")[:tokens],
            positions=device("positions")[:tokens],
            slot_mapping=device("slots")[:tokens],
            cu_seqlens_q=device("cu_seqlens")[: rows + 1],
            seq_lens=device("seq_lens")[:rows],
            block_table=device("block_table")[:rows],
            logits_index=device("slots")[:0],
            query_lens=(tokens,) * rows,
            context_lens=(self._longest,) * rows,
            page_size=self._layout.page_size,
            recorded=True,
            trees=trees,
        )

    def fill(self, rows: Sequence[RowSlice], bucket: PrefillBucket) -> Tensor:
        """Write rows that the bucket holds and enqueue their copy to the device.

        Returns which tokens get logits: int64 [num_logits], on the host.
        """
        layout = self._layout
        self._staging.await_copy()
        missing = bucket.tokens - sum([len(row.token_ids) for row in rows])
        pages = [layout.scratch_page] * -(-missing // layout.page_size)
        batch = pack([*rows, RowSlice([0] * missing, 0, pages, 0)], layout.page_size, _CPU)
        num_rows, width = batch.block_table.shape
        to = self._staging.array
        to("input_ids")[: bucket.tokens] = batch.input_ids
        positions = to("positions")[: bucket.tokens]
        np.minimum(batch.positions, layout.max_model_len - 1, out=positions)
        to("slots")[: bucket.tokens] = batch.slot_mapping
        _fill(to("cu_seqlens")[: bucket.rows + 2], batch.cu_seqlens_q, bucket.tokens)
        _fill(to("seq_lens")[: bucket.rows + 1], batch.seq_lens, 0)
        if bucket.trees:
            trees = batch.trees or TreeMask(batch.seq_lens, torch.zeros_like(batch.positions))
            _fill(to("tree_starts")[: bucket.rows + 1], trees.starts, 0)
            to("visible")[: bucket.tokens] = trees.visible
        to("block_table")[:num_rows, :width] = batch.block_table
        self._staging.send("block_table", num_rows)
        return batch.logits_index

    @property
    def input_ids(self) -> Tensor:
        """Return the place of input ids on the device: int64 [at least tokens]."""
        return self._staging.device("input_ids")


def _fill(to: NDArray[Any], numbers: Tensor, rest: int) -> None:
    """Write `numbers`, and `rest` behind them."""
    to[: len(numbers)] = numbers
    to[len(numbers) :] = rest
