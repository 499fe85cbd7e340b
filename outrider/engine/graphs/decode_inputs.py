"""Inputs of captured steps of fixed shape.

A bucket is R rows, packed, of T tokens in all and Q at most each. Padding rows fill up the batch,
and padding tokens the rows, each at its end, the last rows first: so every token belongs to a row.
Their keys and values go to the scratch page, and their outputs are not read. A row's length in the
bucket counts its padding tokens, so that its last query is its last key, as attention kernels have
it. Causality hides the padding keys from real queries. Draft trees run in buckets of their own,
whose attention also reads which nodes descend from which.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceDrafts
from outrider.engine.batch import PackedBatch
from outrider.engine.graphs.decode_buckets import Bucket
from outrider.engine.graphs.staging import PageLayout, Staging
from outrider.engine.graphs.tree_inputs import TreeViews
from outrider.engine.sampling.noise import keys_of_seed
from outrider.engine.sampling.sample import SamplingBatch
from outrider.engine.sampling.verify import VerifyBatch
from outrider.engine.sequence import Sequence
from outrider.engine.step import DrawnTokens, FilledIn, ScheduledRow, Step, fill_in_drafts
from outrider.engine.transfers import select_rows
from outrider.engine.tree_mask import TreeMask
from outrider.params import SamplingParams

_SAMPLING = {  # columns of `SamplingParams` and `SamplingBatch`
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
}


@dataclass(frozen=True, slots=True, eq=False)
class _BucketViews:
    """A bucket's columns in the host's buffer, and what follows from its shape alone."""

    input_ids: NDArray[Any]  # int64 [tokens]
    positions: NDArray[Any]  # int64 [tokens]
    slots: NDArray[Any]  # int64 [tokens]
    sampling: list[tuple[NDArray[Any], NDArray[Any]]]  # columns by row, and the same by token
    cu_seqlens: NDArray[Any]  # int32 [rows + 1]
    draft_lens: NDArray[Any]  # int32 [rows]
    seq_lens: NDArray[Any]  # int32 [rows]
    rows: NDArray[Any]  # int64 [rows]: 0, 1, ...
    places: NDArray[Any]  # int64 [tokens]: likewise
    lens: NDArray[Any]  # int64 [rows]: of rows with `query_len` tokens each
    row_of: NDArray[Any]  # int64 [tokens]: the row of each token then
    steps: NDArray[Any]  # int64 [tokens]: its place in that row
    trees: TreeViews | None


@dataclass(slots=True, eq=False)
class _RowConstants:
    """The part of a row that stays from step to step, converted once.

    A page table may grow at its end. Any other change of it is another list, and no two sequences
    share one.
    """

    table: Rows[int]
    pages: NDArray[Any]  # int32: the known part of `table`, then the scratch page
    sampling: SamplingParams
    keys: NDArray[Any]  # int64 [2]
    needs_eager_sampling: bool
    num_pages: int = 0


class DecodeInputs:
    """Staging of a step's inputs, shared by all buckets.

    Page tables come last in the buffer, so that one copy brings what a bucket needs and no more.
    """

    def __init__(self, buckets: Rows[Bucket], layout: PageLayout) -> None:
        self._layout = layout
        self._num_rows = rows = max(bucket.rows for bucket in buckets)
        query_len = max(bucket.query_len for bucket in buckets)
        tokens = max(bucket.tokens for bucket in buckets)
        self._max_seq_len = layout.max_model_len + query_len - 1  # of a row with its padding
        self._table_width = -(-self._max_seq_len // layout.page_size)
        trees: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "tree_starts": (torch.int32, (rows,)),
            "parents": (torch.int64, (rows * query_len,)),
        }
        self._visible = torch.zeros(tokens, dtype=torch.int64, device=layout.device)
        self._staging = Staging(
            {
                "input_ids": (torch.int64, (tokens,)),
                "positions": (torch.int64, (tokens,)),
                "slots": (torch.int64, (tokens,)),
                "keys": (torch.int64, (tokens, 2)),
                **{name: (dtype, (tokens,)) for name, dtype in _SAMPLING.items()},
                "cu_seqlens": (torch.int32, (rows + 1,)),
                "draft_lens": (torch.int32, (rows,)),
                "seq_lens": (torch.int32, (rows,)),
                **(trees if any(bucket.trees for bucket in buckets) else {}),
                "block_table": (torch.int32, (rows, self._table_width)),
            },
            layout.device,
        )
        self._views: dict[Bucket, _BucketViews] = {}
        self._by_row = {  # sampling columns
            name: np.zeros(
                (rows, *self._staging.array(name).shape[1:]), self._staging.array(name).dtype
            )
            for name in ("keys", *_SAMPLING)
        }
        self._tables = self._staging.array("block_table")
        self._tables.fill(layout.scratch_page)
        self._padding = _RowConstants(
            table=(),
            pages=np.full(self._table_width, layout.scratch_page, np.int32),
            sampling=SamplingParams(temperature=0.0),
            keys=np.zeros(2, np.int64),
            needs_eager_sampling=False,
        )
        self._known: dict[object, _RowConstants] = {}  # by sequence
        self._at = [self._padding] * rows  # of each row of the buffer, and in columns:
        self._tables_at = [self._padding.table] * rows
        self._lengths = [0] * rows  # pages that the buffer has
        self._eager = [False] * rows  # it needs eager sampling
        self._rows_of: Bucket | None = None  # a full one, whose columns hold these rows

    def batch(self, bucket: Bucket) -> PackedBatch:
        """Return a bucket's batch: views of the device's buffer, and constants."""
        column, rows, tokens = self._staging.device, bucket.rows, bucket.tokens
        device = self._layout.device
        trees = None
        if bucket.trees:
            trees = TreeMask(column("tree_starts")[:rows], self._visible[:tokens])
        return PackedBatch(
            input_ids=column("input_ids")[:tokens],
            positions=column("positions")[:tokens],
            slot_mapping=column("slots")[:tokens],
            cu_seqlens_q=column("cu_seqlens")[: rows + 1],
            seq_lens=column("seq_lens")[:rows],
            block_table=column("block_table")[:rows],
            logits_index=torch.arange(tokens, device=device),
            query_lens=(bucket.query_len,) * rows,
            context_lens=(self._max_seq_len,) * rows,
            page_size=self._layout.page_size,
            recorded=True,
            trees=trees,
        )

    def parents(self, bucket: Bucket) -> Tensor:
        """Return the parents of a bucket's nodes: a device view, int64 [rows, query_len - 1]."""
        parents = self._staging.device("parents")[: bucket.rows * bucket.query_len]
        return parents.view(bucket.rows, -1)[:, :-1]

    def verify_batch(self, bucket: Bucket) -> VerifyBatch:
        """Return what a bucket's verification reads: views of the device's buffer."""
        column, rows, tokens = self._staging.device, bucket.rows, bucket.tokens
        return VerifyBatch(
            input_ids=column("input_ids")[:tokens],
            cu_seqlens=column("cu_seqlens")[: rows + 1],
            draft_lens=column("draft_lens")[:rows],
            sampling=SamplingBatch(
                **{name: column(name)[:tokens] for name in _SAMPLING},
                seed=column("keys")[:tokens],
                position=column("positions")[:tokens],
                all_greedy=False,
                any_greedy=True,
                any_sorted=True,
                any_min_p=True,
            ),
        )

    def fill(self, step: Step, bucket: Bucket) -> bool:
        """Write a step's rows, and padding rows after them, to the host's buffer.

        Returns whether some row needs eager sampling.
        """
        layout, singles, slices = self._layout, step.singles, [row.slice for row in step.others]
        self._staging.await_copy()
        num_rows, num_tokens = step.num_rows, step.num_tokens
        self._take_tables(step, singles.tables + [part.block_table for part in slices], bucket)

        to = self._views.get(bucket) or self._view(bucket)
        padding = [0] * (bucket.rows - num_rows)
        counts = to.lens
        if bucket.query_len > 1 or padding:
            lengths = [1] * len(singles) + [len(part.token_ids) for part in slices]
            counts = np.array(lengths + padding)
        first = np.array(singles.starts + [part.start for part in slices] + padding)
        lens, row_of, steps = to.lens, to.row_of, to.steps
        if not bucket.full:  # the last rows take the padding first, each as much as it can
            free = bucket.query_len - counts
            after = free[::-1].cumsum()[::-1] - free
            lens = counts + np.clip(bucket.tokens - num_tokens - after, 0, free)
            row_of = np.repeat(to.rows, lens)  # of each token
            steps = to.places - (lens.cumsum() - lens)[row_of]  # 0, 1, ... in each row
        np.add(first, lens, out=to.seq_lens, casting="same_kind")
        np.subtract(counts, 1, out=to.draft_lens, casting="same_kind")
        if self._rows_of is not bucket:
            np.cumsum(lens, out=to.cu_seqlens[1:])
            for by_row, by_token in to.sampling:
                np.take(by_row, row_of, axis=0, out=by_token, mode="clip")
            self._rows_of = bucket if bucket.full else None
        np.add(first[row_of], steps, out=to.positions)
        # There are no positions behind the longest context, which only padding tokens reach.
        np.minimum(to.positions, layout.max_model_len - 1, out=to.positions)
        pages = to.positions // layout.page_size
        # A position p of the table's n-th page has the slot (table[n] - n) * page_size + p.
        np.subtract(self._tables[row_of, pages], pages, out=to.slots)
        np.multiply(to.slots, layout.page_size, out=to.slots)
        np.add(to.slots, to.positions, out=to.slots)
        flat = [*singles.tokens, *chain.from_iterable([part.token_ids for part in slices])]
        if num_tokens == bucket.tokens:
            to.input_ids[:] = flat
        else:
            real = steps < counts[row_of]
            to.input_ids.fill(0)
            to.input_ids[real] = flat
            to.slots[~real] = layout.scratch_page * layout.page_size
        if to.trees is not None:
            parts = enumerate(slices, len(singles))
            to.trees.fill(parts, first)
        return any(self._eager[:num_rows])

    def _take_tables(self, step: Step, tables: list[Rows[int]], bucket: Bucket) -> None:
        """Write what is new of rows and of their page tables to the host's buffer."""
        num_rows = len(tables)
        if not all(map(is_, tables, self._tables_at)):
            for i, (seq, table) in enumerate(zip(step.seqs, tables, strict=True)):
                if table is not self._tables_at[i]:
                    constants = self._known.get(seq, self._padding)
                    if constants.table is not table:
                        constants = self._learn(seq, table)
                    self._place(i, constants)
            if len(self._known) > 2 * self._num_rows:
                self._known = dict(zip(step.seqs, self._at, strict=False))
        if (lengths := [*map(len, tables)]) != self._lengths[:num_rows]:
            for i, length in enumerate(lengths):
                if self._lengths[i] < length:
                    self._grow(i, self._at[i])
        for i in range(num_rows, bucket.rows):
            if self._at[i] is not self._padding:
                self._place(i, self._padding)

    def send(self, bucket: Bucket) -> None:
        """Enqueue the copy of what a bucket needs to the device."""
        self._staging.send("block_table", bucket.rows)

    def take_device_drafts(
        self, late: DeviceDrafts, rows: Rows[ScheduledRow], bucket: Bucket
    ) -> None:
        """Enqueue, behind the copy, what replaces rows' drafts by those on the device."""
        if late.nodes.parents is None and bucket.full:  # padding may have any tokens
            places = [late.places.get(row.seq.session_id, 0) for row in rows]
            tokens = select_rows(late.nodes.tokens, places)[:, : bucket.query_len - 1]
            real = self._staging.device("input_ids")[: len(rows) * bucket.query_len]
            real.view(len(rows), -1)[:, 1 : 1 + tokens.shape[1]].copy_(tokens)
            return
        firsts = [start + 1 for start in self.row_starts(bucket)[: len(rows)]]
        parts = [FilledIn(late.nodes.tokens, firsts, self._staging.device("input_ids"))]
        if late.nodes.parents is not None:
            firsts = [*range(0, len(rows) * bucket.query_len, bucket.query_len)]
            parts.append(FilledIn(late.nodes.parents, firsts, self._staging.device("parents")))
        fill_in_drafts(late, rows, *parts)

    def take_drawn(self, drawn: DrawnTokens, bucket: Bucket) -> None:
        """Enqueue, behind the copy, what replaces rows' only tokens by those on the device."""
        input_ids, num_rows = self._staging.device("input_ids"), len(drawn.sources)
        if bucket.query_len == 1 and drawn.sources == range(num_rows):
            input_ids[:num_rows].copy_(drawn.verified[:num_rows, 1])
        else:
            drawn.fill_in(input_ids, self._views[bucket].cu_seqlens[:num_rows])

    def row_starts(self, bucket: Bucket) -> Rows[int]:
        """Return where the rows of the bucket's last step begin among its tokens."""
        if bucket.full:
            return range(0, bucket.tokens, bucket.query_len)
        starts: list[int] = self._views[bucket].cu_seqlens[:-1].tolist()
        return starts

    def _view(self, bucket: Bucket) -> _BucketViews:
        rows, tokens = bucket.rows, bucket.tokens

        def by_token(name: str) -> NDArray[Any]:
            return self._staging.array(name)[:tokens]

        trees = None
        if bucket.trees:
            parents = self._staging.array("parents")[: rows * bucket.query_len]
            trees = TreeViews(self._staging.array("tree_starts")[:rows], parents.reshape(rows, -1))
        self._views[bucket] = views = _BucketViews(
            input_ids=by_token("input_ids"),
            positions=by_token("positions"),
            slots=by_token("slots"),
            sampling=[(column, by_token(name)) for name, column in self._by_row.items()],
            cu_seqlens=self._staging.array("cu_seqlens")[: rows + 1],
            draft_lens=self._staging.array("draft_lens")[:rows],
            seq_lens=self._staging.array("seq_lens")[:rows],
            rows=np.arange(rows),
            places=np.arange(tokens),
            lens=np.full(rows, bucket.query_len),
            row_of=np.repeat(np.arange(rows), bucket.query_len)[:tokens],
            steps=np.arange(tokens) % bucket.query_len,
            trees=trees,
        )
        return views

    def _learn(self, seq: Sequence, table: Rows[int]) -> _RowConstants:
        params = seq.request.sampling
        self._known[seq] = constants = _RowConstants(
            table=table,
            pages=self._padding.pages.copy(),
            sampling=params,
            keys=np.array(keys_of_seed(params.seed)),
            needs_eager_sampling=seq.needs_eager_sampling,
        )
        return constants

    def _place(self, i: int, constants: _RowConstants) -> None:
        self._rows_of = None
        pages = slice(max(self._lengths[i], constants.num_pages))  # behind it is the scratch page
        self._at[i], self._tables_at[i] = constants, constants.table
        self._lengths[i], self._eager[i] = constants.num_pages, constants.needs_eager_sampling
        self._tables[i, pages] = constants.pages[pages]
        for name in _SAMPLING:
            self._by_row[name][i] = getattr(constants.sampling, name)
        self._by_row["keys"][i] = constants.keys

    def _grow(self, i: int, constants: _RowConstants) -> None:
        """Take in what was appended to the page table of row i of the buffer."""
        # Trees may reach beyond the longest context, and run eagerly then.
        known, length = constants.num_pages, min(len(constants.table), self._table_width)
        if known == self._lengths[i] == length - 1:  # as most do, in a tenth of the time
            constants.pages[known] = self._tables[i, known] = constants.table[known]
            constants.num_pages = self._lengths[i] = length
            return
        constants.pages[known:length] = constants.table[known:length]
        constants.num_pages = length
        new = slice(self._lengths[i], length)
        self._tables[i, new] = constants.pages[new]
        self._lengths[i] = length
