"""Inputs of captured steps of fixed shape.

A bucket is R rows of exactly Q tokens. Padding tokens fill up a row at its end, padding rows fill
up the batch: their keys and values go to the scratch page, and their outputs are not read. A row's
length in the bucket is start + Q, so that its last query is its last key, as attention kernels have
it. Causality hides the padding keys from real queries. Draft trees run in buckets of their own,
whose attention also reads which nodes descend from which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceDrafts
from outrider.engine.batch import PackedBatch
from outrider.engine.graphs.staging import PageLayout, Staging, select_rows
from outrider.engine.graphs.tree_inputs import TreeViews
from outrider.engine.sampling.coupled import SamplingBatch, seed_keys
from outrider.engine.sampling.verify import VerifyBatch
from outrider.engine.step import DrawnTokens, ScheduledRow
from outrider.engine.tree_mask import TreeMask
from outrider.params import SamplingParams

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)  # then every 64th
_SAMPLING = {  # columns of `SamplingParams` and `SamplingBatch`
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
}


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape of a captured step."""

    query_len: int
    rows: int
    trees: bool = False  # rows hold trees or chains

    @property
    def tokens(self) -> int:
        return self.rows * self.query_len


def make_buckets(
    max_num_seqs: int, query_lens: Sequence[int], tree_lens: Sequence[int] = ()
) -> list[Bucket]:
    """Return all buckets for up to `max_num_seqs` rows, smallest first; `tree_lens` with trees."""
    sizes = (*_ROWS, *range(128, max_num_seqs, 64))
    rows = (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
    shapes = {(q, False) for q in query_lens} | {(q, True) for q in tree_lens}
    return sorted(Bucket(q, n, trees) for q, trees in shapes for n in rows)


@dataclass(frozen=True, slots=True, eq=False)
class _BucketViews:
    """A bucket's columns in the host's buffer, and what follows from its shape alone."""

    input_ids: NDArray[Any]  # int64 [rows, query_len]
    positions: NDArray[Any]  # int64 [rows, query_len]
    slots: NDArray[Any]  # int64 [rows, query_len]
    draft_lens: NDArray[Any]  # int32 [rows]
    seq_lens: NDArray[Any]  # int32 [rows]
    first_pages: NDArray[Any]  # int64 [rows, 1]: where each row's page table starts
    steps: NDArray[Any]  # int64 [query_len]: 0, 1, ...
    trees: TreeViews | None


@dataclass(slots=True, eq=False)
class _RowConstants:
    """The part of a row that stays from step to step, converted once.

    A page table may grow at its end. Any other change of it is another list, and no two sequences
    share one.
    """

    table: Sequence[int]
    pages: NDArray[Any]  # int32: the known part of `table`, then the scratch page
    sampling: SamplingParams
    keys: NDArray[Any]  # int64 [2]
    needs_eager_sampling: bool
    num_pages: int = 0


class DecodeInputs:
    """Staging of a step's inputs, shared by all buckets.

    Page tables come last in the buffer, so that one copy brings what a bucket needs and no more.
    """

    def __init__(self, buckets: Sequence[Bucket], layout: PageLayout) -> None:
        self._layout = layout
        self._num_rows = rows = max(bucket.rows for bucket in buckets)
        query_len = max(bucket.query_len for bucket in buckets)
        tokens = rows * query_len
        self._max_seq_len = layout.max_model_len + query_len - 1  # of a row with its padding
        self._table_width = -(-self._max_seq_len // layout.page_size)
        trees: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "tree_starts": (torch.int32, (rows,)),
            "visible": (torch.int64, (tokens,)),
            "parents": (torch.int64, (tokens,)),
        }
        self._staging = Staging(
            {
                "input_ids": (torch.int64, (tokens,)),
                "positions": (torch.int64, (tokens,)),
                "slots": (torch.int64, (tokens,)),
                "keys": (torch.int64, (rows, 2)),
                **{name: (dtype, (rows,)) for name, dtype in _SAMPLING.items()},
                "draft_lens": (torch.int32, (rows,)),
                "seq_lens": (torch.int32, (rows,)),
                **(trees if any(bucket.trees for bucket in buckets) else {}),
                "block_table": (torch.int32, (rows, self._table_width)),
            },
            layout.device,
        )
        self._views: dict[Bucket, _BucketViews] = {}
        self._keys = self._staging.array("keys")
        self._sampling = {name: self._staging.array(name) for name in _SAMPLING}
        self._tables = self._staging.array("block_table")
        self._tables.fill(layout.scratch_page)
        self._flat_tables = self._tables.ravel()
        self._padding = _RowConstants(
            table=(),
            pages=np.full(self._table_width, layout.scratch_page, np.int32),
            sampling=SamplingParams(temperature=0.0),
            keys=np.zeros(2, np.int64),
            needs_eager_sampling=False,
        )
        self._known: dict[object, _RowConstants] = {}  # by sequence
        self._at: list[_RowConstants] = [self._padding] * rows  # of each row of the buffer,
        self._lengths = [0] * rows  # and how many of its pages the buffer has

    def batch(self, bucket: Bucket) -> PackedBatch:
        """Return a bucket's batch: views of the device's buffer, and constants."""
        column, rows, tokens = self._staging.device, bucket.rows, bucket.tokens
        device = self._layout.device
        trees = None
        if bucket.trees:
            trees = TreeMask(column("tree_starts")[:rows], column("visible")[:tokens])
        return PackedBatch(
            input_ids=column("input_ids")[:tokens],
            positions=column("positions")[:tokens],
            slot_mapping=column("slots")[:tokens],
            cu_seqlens_q=torch.arange(
                0, tokens + 1, bucket.query_len, dtype=torch.int32, device=device
            ),
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
        parents = self._staging.device("parents")[: bucket.tokens]
        return parents.view(bucket.rows, -1)[:, :-1]

    def verify_batch(self, bucket: Bucket) -> VerifyBatch:
        """Return what a bucket's verification reads: views of the device's buffer."""
        column, rows, tokens = self._staging.device, bucket.rows, bucket.tokens
        return VerifyBatch(
            input_ids=column("input_ids")[:tokens].view(rows, -1),
            draft_lens=column("draft_lens")[:rows],
            sampling=SamplingBatch(
                **{name: column(name)[:rows] for name in _SAMPLING},
                seed=column("keys")[:rows],
                position=column("positions")[:tokens],
                all_greedy=False,
                any_greedy=True,
                any_sorted=True,
                any_min_p=True,
            ),
        )

    def fill(self, rows: Sequence[ScheduledRow], bucket: Bucket) -> bool:
        """Write a step's rows, and padding rows after them, to the host's buffer.

        Returns whether some row needs eager sampling.
        """
        layout, query_len, eager_sampling = self._layout, bucket.query_len, False
        self._staging.await_copy()
        slices = [row.slice for row in rows]
        tokens, starts, tables, *_ = zip(*slices, strict=True) if rows else ((),) * 3
        for i, table in enumerate(tables):
            constants = self._at[i]
            if constants.table is not table:
                constants = self._known.get(rows[i].seq, self._padding)
                if constants.table is not table:
                    constants = self._learn(rows[i])
                self._place(i, constants)
            if self._lengths[i] < len(table):
                self._grow(i, constants)
            eager_sampling = eager_sampling or constants.needs_eager_sampling
        for i in range(len(rows), bucket.rows):
            if self._at[i] is not self._padding:
                self._place(i, self._padding)
        if len(self._known) > 2 * self._num_rows:
            self._known = {row.seq: at for row, at in zip(rows, self._at, strict=False)}

        to = self._views.get(bucket) or self._view(bucket)
        padding = (0,) * (bucket.rows - len(rows))
        counts = np.array([*map(len, tokens), *padding])
        first = np.array(starts + padding)
        np.subtract(counts, 1, out=to.draft_lens, casting="same_kind")
        np.add(first, query_len, out=to.seq_lens, casting="same_kind")
        np.add(first[:, None], to.steps, out=to.positions)
        # There are no positions behind the longest context, which only padding tokens reach.
        np.minimum(to.positions, layout.max_model_len - 1, out=to.positions)
        pages = to.positions // layout.page_size
        # A position p of the table's n-th page has the slot (table[n] - n) * page_size + p.
        np.subtract(self._flat_tables.take(pages + to.first_pages), pages, out=to.slots)
        np.multiply(to.slots, layout.page_size, out=to.slots)
        np.add(to.slots, to.positions, out=to.slots)
        num_tokens = int(counts.sum())
        flat = np.fromiter(chain.from_iterable(tokens), np.int64, num_tokens)
        if num_tokens == bucket.tokens:
            to.input_ids[:] = flat.reshape(to.input_ids.shape)
        else:
            real = to.steps < counts[:, None]  # [rows, query_len]
            to.input_ids.fill(0)
            to.input_ids[real] = flat
            to.slots[~real] = layout.scratch_page * layout.page_size
        if to.trees is not None:
            to.trees.fill(slices, to.seq_lens, to.positions)
        return eager_sampling

    def send(self, bucket: Bucket) -> None:
        """Enqueue the copy of what a bucket needs to the device."""
        self._staging.send("block_table", bucket.rows)

    def take_device_drafts(
        self, late: DeviceDrafts, rows: Sequence[ScheduledRow], bucket: Bucket
    ) -> None:
        """Enqueue, behind the copy, what replaces the rows' drafts by those on the device.

        Rows with fewer tokens get more than they have, which nobody reads.
        """
        count, width = len(rows), min(bucket.query_len - 1, late.tokens.shape[1])
        places = [late.places[row.seq.session_id] for row in rows]
        drafts = select_rows(late.tokens[:, :width], places)
        ids = self._staging.device("input_ids")[: bucket.tokens].view(bucket.rows, -1)
        ids[:count, 1 : 1 + width] = drafts

    def take_drawn(self, drawn: DrawnTokens, bucket: Bucket) -> None:
        """Enqueue, behind the copy, what replaces rows' only tokens by those on the device."""
        firsts = range(0, len(drawn.sources) * bucket.query_len, bucket.query_len)
        drawn.fill_in(self._staging.device("input_ids"), firsts)

    def _view(self, bucket: Bucket) -> _BucketViews:
        rows, shape = bucket.rows, (bucket.rows, bucket.query_len)

        def by_token(name: str) -> NDArray[Any]:
            return self._staging.array(name)[: bucket.tokens].reshape(shape)

        trees = None
        if bucket.trees:
            starts = self._staging.array("tree_starts")[:rows]
            trees = TreeViews(starts, by_token("visible"), by_token("parents"))
        self._views[bucket] = views = _BucketViews(
            input_ids=by_token("input_ids"),
            positions=by_token("positions"),
            slots=by_token("slots"),
            draft_lens=self._staging.array("draft_lens")[:rows],
            seq_lens=self._staging.array("seq_lens")[:rows],
            first_pages=np.arange(rows)[:, None] * self._table_width,
            steps=np.arange(bucket.query_len),
            trees=trees,
        )
        return views

    def _learn(self, row: ScheduledRow) -> _RowConstants:
        params = row.seq.request.sampling
        self._known[row.seq] = constants = _RowConstants(
            table=row.slice.block_table,
            pages=self._padding.pages.copy(),
            sampling=params,
            keys=seed_keys([params.seed])[0].numpy(),
            needs_eager_sampling=row.seq.needs_eager_sampling,
        )
        return constants

    def _place(self, i: int, constants: _RowConstants) -> None:
        self._at[i], self._lengths[i] = constants, constants.num_pages
        self._tables[i] = constants.pages
        for name, column in self._sampling.items():
            column[i] = getattr(constants.sampling, name)
        self._keys[i] = constants.keys

    def _grow(self, i: int, constants: _RowConstants) -> None:
        """Take in what was appended to the page table of row i of the buffer."""
        # Trees may reach beyond the longest context, and run eagerly then.
        known, length = constants.num_pages, min(len(constants.table), self._table_width)
        constants.pages[known:length] = constants.table[known:length]
        constants.num_pages = length
        new = slice(self._lengths[i], length)
        self._tables[i, new] = constants.pages[new]
        self._lengths[i] = length
