"""Forwards of fixed size over rows of any lengths: what a recorded one reads.

A bucket is T tokens in R rows. One row more is *inert*: it has the tokens that are missing, whose
keys and values go to the scratch page. Rows that are missing are empty, behind it.
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
from outrider.engine.graphs.staging import PinnedMirror

_TOKENS = (*range(64, 1024, 64), *range(1024, 2049, 128))
"""Beyond, a forward takes longer than launching its kernels one by one does."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, order=True)
class PrefillBucket:
    """The size of a recorded forward, without its inert row."""

    tokens: int
    rows: int


def make_prefill_buckets(max_tokens: int, max_rows: int) -> list[PrefillBucket]:
    """All buckets for at most `max_rows` rows and, as far as it pays, `max_tokens` tokens.

    Rows that are missing cost next to nothing; and more rows than tokens there cannot be.
    """
    tokens = _TOKENS[: bisect_left(_TOKENS, max_tokens) + 1]
    return [PrefillBucket(t, min(max_rows, t)) for t in tokens]


class PrefillInputs:
    """The inputs of a forward, where every recorded one finds them."""

    def __init__(
        self,
        buckets: Sequence[PrefillBucket],
        *,
        max_model_len: int,
        page_size: int,
        scratch_page: int,
        device: torch.device,
    ) -> None:
        tokens = max(bucket.tokens for bucket in buckets)
        rows = max(bucket.rows for bucket in buckets) + 1
        self._last_position = max_model_len - 1
        self._page_size = page_size
        self._scratch_page = scratch_page
        self._longest = max(max_model_len, tokens)  # the inert row may be longer than any text
        self._twins = PinnedMirror(
            {
                "input_ids": (torch.int64, (tokens,)),
                "positions": (torch.int64, (tokens,)),
                "slots": (torch.int64, (tokens,)),
                "cu_seqlens": (torch.int32, (rows + 1,)),
                "seq_lens": (torch.int32, (rows,)),
                "block_table": (torch.int32, (rows, -(-self._longest // page_size))),
            },
            device,
        )

    def batch(self, bucket: PrefillBucket) -> PackedBatch:
        """A bucket's batch, without logits: views of the device's buffer."""
        device, tokens, rows = self._twins.device, bucket.tokens, bucket.rows + 1
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
            page_size=self._page_size,
            recorded=True,
        )

    def fill(self, rows: Sequence[RowSlice], bucket: PrefillBucket) -> Tensor:
        """Write rows that the bucket holds, and enqueues their copy to the device.

        The forward before must have read its own. Returns which tokens get logits: int64
        [num_logits], on the host.
        """
        missing = bucket.tokens - sum([len(row.token_ids) for row in rows])
        pages = [self._scratch_page] * -(-missing // self._page_size)
        batch = pack([*rows, RowSlice([0] * missing, 0, pages, 0)], self._page_size, _CPU)
        num_rows, width = batch.block_table.shape
        to = self._twins.host
        to("input_ids")[: bucket.tokens] = batch.input_ids
        np.minimum(batch.positions, self._last_position, out=to("positions")[: bucket.tokens])
        to("slots")[: bucket.tokens] = batch.slot_mapping
        _fill(to("cu_seqlens")[: bucket.rows + 2], batch.cu_seqlens_q, bucket.tokens)
        _fill(to("seq_lens")[: bucket.rows + 1], batch.seq_lens, 0)
        table = to("block_table")
        table[:num_rows, :width] = batch.block_table
        end = self._twins.offsets["block_table"] + table[:num_rows].nbytes
        on_host, on_device = self._twins.first(end)
        on_device.copy_(on_host, non_blocking=True)
        return batch.logits_index


def _fill(to: NDArray[Any], numbers: Tensor, rest: int) -> None:
    """`numbers`, and then only `rest`."""
    to[: len(numbers)] = numbers
    to[len(numbers) :] = rest
