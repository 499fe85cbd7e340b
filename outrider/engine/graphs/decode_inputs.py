"""Steps of fixed shape: what a recorded step reads, always at the same place.

A bucket is R rows of exactly Q tokens. A row with fewer tokens is filled up at its end, a step with
fewer rows by whole rows; what fills up is *inert*: its keys and values go to the scratch page, its
outputs are not looked at. A row's length in the bucket is start + Q, so that its last query, inert
or not, is its last key, as attention kernels have it; causality hides inert keys from real queries.
Draft trees run in buckets of their own, whose attention also reads who descends from whom.
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
from outrider.engine.graphs.staging import PinnedMirror, picked
from outrider.engine.graphs.tree_inputs import TreeViews
from outrider.engine.sampling.coupled import SamplingBatch, seed_keys
from outrider.engine.sampling.verify import VerifyBatch
from outrider.engine.step import ScheduledRow
from outrider.engine.tree_mask import TreeMask
from outrider.params import SamplingParams

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)  # then every 64th
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # of `SamplingParams` and `SamplingBatch`


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape of a recorded step."""

    query_len: int
    rows: int
    trees: bool = False  # of rows that hold trees, or chains

    @property
    def tokens(self) -> int:
        return self.rows * self.query_len


def make_buckets(
    max_num_seqs: int, query_lens: Sequence[int], tree_lens: Sequence[int] = ()
) -> list[Bucket]:
    """All buckets for up to `max_num_seqs` rows, smallest first; `tree_lens` with trees."""
    sizes = (*_ROWS, *range(128, max_num_seqs, 64))
    rows = (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
    shapes = {(q, False) for q in query_lens} | {(q, True) for q in tree_lens}
    return sorted(Bucket(q, n, trees) for q, trees in shapes for n in rows)


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """How large the inputs of the largest bucket are."""

    rows: int
    query_len: int
    max_model_len: int
    page_size: int
    scratch_page: int
    trees: bool = False  # some bucket holds them

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest row, filled up."""
        return self.max_model_len + self.query_len - 1

    @property
    def table_width(self) -> int:
        return -(-self.max_seq_len // self.page_size)


@dataclass(frozen=True, slots=True, eq=False)
class _BucketViews:
    """Where a bucket's inputs are in the host's buffer, and what its shape alone decides."""

    input_ids: NDArray[Any]  # int64 [rows, query_len]
    positions: NDArray[Any]  # int64 [rows, query_len]
    slots: NDArray[Any]  # int64 [rows, query_len]
    draft_lens: NDArray[Any]  # int32 [rows]
    seq_lens: NDArray[Any]  # int32 [rows]
    first_pages: NDArray[Any]  # int64 [rows, 1]: where each row's page table starts
    steps: NDArray[Any]  # int64 [query_len]: 0, 1, ...
    trees: TreeViews | None
    on_host: Tensor  # the bytes that hold all of it,
    on_device: Tensor  # and their place there


@dataclass(slots=True, eq=False)
class _Constants:
    """What stays as it is in a row from step to step; converting it again would take too long.

    A page table may grow; any other change of it is another list. No two sequences share one.
    """

    table: Sequence[int]
    pages: NDArray[Any]  # int32: `table` as far as it was known, then the scratch page
    sampling: SamplingParams
    keys: NDArray[Any]  # int64 [2]
    apart: bool  # drawing its tokens takes more than is recorded
    num_pages: int = 0


class DecodeInputs:
    """The inputs of a step, where every recorded step finds them.

    Page tables come last in the buffer, so that one copy brings what a bucket needs and no more.
    """

    def __init__(self, sizes: DecodeSizes, device: torch.device) -> None:
        self._sizes = sizes
        rows, tokens = sizes.rows, sizes.rows * sizes.query_len
        trees: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "tree_starts": (torch.int32, (rows,)),
            "visible": (torch.int64, (tokens,)),
            "parents": (torch.int64, (tokens,)),
        }
        self._twins = twins = PinnedMirror(
            {
                "input_ids": (torch.int64, (tokens,)),
                "positions": (torch.int64, (tokens,)),
                "slots": (torch.int64, (tokens,)),
                "keys": (torch.int64, (rows, 2)),
                "temperature": (torch.float32, (rows,)),
                "top_k": (torch.int64, (rows,)),
                "top_p": (torch.float32, (rows,)),
                "min_p": (torch.float32, (rows,)),
                "draft_lens": (torch.int32, (rows,)),
                "seq_lens": (torch.int32, (rows,)),
                **(trees if sizes.trees else {}),
                "block_table": (torch.int32, (rows, sizes.table_width)),
            },
            device,
        )
        self._views: dict[Bucket, _BucketViews] = {}
        self._keys = twins.host("keys")
        self._sampling = {name: twins.host(name) for name in _SAMPLING}
        self._tables = twins.host("block_table")
        self._tables.fill(sizes.scratch_page)
        self._flat_tables = self._tables.ravel()
        pages = np.full(sizes.table_width, sizes.scratch_page, np.int32)
        self._inert = _Constants(
            (), pages, SamplingParams(temperature=0.0), np.zeros(2, np.int64), apart=False
        )
        self._known: dict[object, _Constants] = {}  # by sequence
        self._at: list[_Constants] = [self._inert] * rows  # what each row of the buffer holds,
        self._lengths = [0] * rows  # and so much of its table

    def batch(self, bucket: Bucket) -> PackedBatch:
        """A bucket's batch: views of the device's buffer, and constants for the host's numbers."""
        twins, rows, tokens = self._twins, bucket.rows, bucket.tokens
        device = twins.device("seq_lens").device
        return PackedBatch(
            input_ids=twins.device("input_ids")[:tokens],
            positions=twins.device("positions")[:tokens],
            slot_mapping=twins.device("slots")[:tokens],
            cu_seqlens_q=torch.arange(
                0, tokens + 1, bucket.query_len, dtype=torch.int32, device=device
            ),
            seq_lens=twins.device("seq_lens")[:rows],
            block_table=twins.device("block_table")[:rows],
            logits_index=torch.arange(tokens, device=device),
            query_lens=(bucket.query_len,) * rows,
            context_lens=(self._sizes.max_seq_len,) * rows,
            page_size=self._sizes.page_size,
            recorded=True,
            trees=TreeMask(
                starts=twins.device("tree_starts")[:rows],
                visible=twins.device("visible")[:tokens],
            )
            if bucket.trees
            else None,
        )

    def parents(self, bucket: Bucket) -> Tensor:
        """Of a bucket's nodes, int64 [rows, query_len - 1]: a view of the device's buffer."""
        parents = self._twins.device("parents")[: bucket.tokens]
        return parents.view(bucket.rows, -1)[:, :-1]

    def verify_batch(self, bucket: Bucket) -> VerifyBatch:
        """What a bucket's verification reads: views of the device's buffer."""
        twins, rows, tokens = self._twins, bucket.rows, bucket.tokens
        return VerifyBatch(
            input_ids=twins.device("input_ids")[:tokens].view(rows, -1),
            draft_lens=twins.device("draft_lens")[:rows],
            sampling=SamplingBatch(
                **{name: twins.device(name)[:rows] for name in _SAMPLING},
                seed=twins.device("keys")[:rows],
                position=twins.device("positions")[:tokens],
                all_greedy=False,
                any_greedy=True,
                any_sorted=True,
                any_min_p=True,
            ),
        )

    def fill(self, rows: Sequence[ScheduledRow], bucket: Bucket) -> bool:
        """Write a step's rows, and inert ones after them, to the host's buffer.

        Nothing may be copying from it. Returns whether drawing takes more than is recorded.
        """
        sizes, query_len, any_apart = self._sizes, bucket.query_len, False
        slices = [row.slice for row in rows]
        tokens, starts, tables, *_ = zip(*slices, strict=True) if rows else ((),) * 3
        for i, table in enumerate(tables):
            constants = self._at[i]
            if constants.table is not table:
                constants = self._known.get(rows[i].seq, self._inert)
                if constants.table is not table:
                    constants = self._learn(rows[i])
                self._place(i, constants)
            if self._lengths[i] < len(table):
                self._grow(i, constants)
            any_apart = any_apart or constants.apart
        for i in range(len(rows), bucket.rows):
            if self._at[i] is not self._inert:
                self._place(i, self._inert)
        if len(self._known) > 2 * sizes.rows:
            self._known = {row.seq: at for row, at in zip(rows, self._at, strict=False)}

        to = self._view(bucket)
        padding = (0,) * (bucket.rows - len(rows))
        counts = np.array([*map(len, tokens), *padding])
        first = np.array(starts + padding)
        np.subtract(counts, 1, out=to.draft_lens, casting="same_kind")
        np.add(first, query_len, out=to.seq_lens, casting="same_kind")
        np.add(first[:, None], to.steps, out=to.positions)
        # Behind the longest context there are no positions any more; only inert tokens get there.
        np.minimum(to.positions, sizes.max_model_len - 1, out=to.positions)
        pages = to.positions // sizes.page_size
        # A position p of a page that is the table's n-th: (table[n] - n) * page_size + p.
        np.subtract(self._flat_tables.take(pages + to.first_pages), pages, out=to.slots)
        np.multiply(to.slots, sizes.page_size, out=to.slots)
        np.add(to.slots, to.positions, out=to.slots)
        num_tokens = int(counts.sum())
        flat = np.fromiter(chain.from_iterable(tokens), np.int64, num_tokens)
        if num_tokens == bucket.tokens:
            to.input_ids[:] = flat.reshape(to.input_ids.shape)
        else:
            real = to.steps < counts[:, None]  # [rows, query_len]
            to.input_ids.fill(0)
            to.input_ids[real] = flat
            to.slots[~real] = sizes.scratch_page * sizes.page_size
        if to.trees is not None:
            to.trees.plant(slices, to.seq_lens, to.positions)
        return any_apart

    def _view(self, bucket: Bucket) -> _BucketViews:
        if bucket in self._views:
            return self._views[bucket]
        rows, tokens, shape = bucket.rows, bucket.tokens, (bucket.rows, bucket.query_len)
        host = self._twins.host
        table_bytes = rows * self._sizes.table_width * torch.int32.itemsize
        on_host, on_device = self._twins.first(self._twins.offsets["block_table"] + table_bytes)
        self._views[bucket] = views = _BucketViews(
            input_ids=host("input_ids")[:tokens].reshape(shape),
            positions=host("positions")[:tokens].reshape(shape),
            slots=host("slots")[:tokens].reshape(shape),
            draft_lens=host("draft_lens")[:rows],
            seq_lens=host("seq_lens")[:rows],
            first_pages=np.arange(rows)[:, None] * self._sizes.table_width,
            steps=np.arange(bucket.query_len),
            trees=TreeViews(
                starts=host("tree_starts")[:rows],
                visible=host("visible")[:tokens].reshape(shape),
                parents=host("parents")[:tokens].reshape(shape),
            )
            if bucket.trees
            else None,
            on_host=on_host,
            on_device=on_device,
        )
        return views

    def _learn(self, row: ScheduledRow) -> _Constants:
        params = row.seq.request.sampling
        self._known[row.seq] = constants = _Constants(
            table=row.slice.block_table,
            pages=np.full(self._sizes.table_width, self._sizes.scratch_page, np.int32),
            sampling=params,
            keys=seed_keys([params.seed])[0].numpy(),
            apart=row.seq.needs_eager_sampling,
        )
        return constants

    def _place(self, i: int, constants: _Constants) -> None:
        self._at[i], self._lengths[i] = constants, constants.num_pages
        self._tables[i] = constants.pages
        for name, column in self._sampling.items():
            column[i] = getattr(constants.sampling, name)
        self._keys[i] = constants.keys

    def _grow(self, i: int, constants: _Constants) -> None:
        """Take in what was appended to the table of the row at place i."""
        # Trees may reach beyond the longest context, and are not recorded then.
        known, length = constants.num_pages, min(len(constants.table), self._sizes.table_width)
        constants.pages[known:length] = constants.table[known:length]
        constants.num_pages = length
        new = slice(self._lengths[i], length)
        self._tables[i, new] = constants.pages[new]
        self._lengths[i] = length

    def take_device_drafts(
        self, late: DeviceDrafts, rows: Sequence[ScheduledRow], bucket: Bucket
    ) -> None:
        """Enqueues, behind the copy, what puts the rows' true drafts in the place of their own.

        Rows with fewer tokens get some that are not theirs, where nobody looks.
        """
        count, width = len(rows), min(bucket.query_len - 1, late.tokens.shape[1])
        places = [late.places[row.seq.session_id] for row in rows]
        drafts = picked(late.tokens[:, :width], places)
        ids = self._twins.device("input_ids")[: bucket.tokens].view(bucket.rows, -1)
        ids[:count, 1 : 1 + width] = drafts

    def copy(self, bucket: Bucket) -> None:
        """Enqueues the copy of what a bucket needs to the device."""
        to = self._view(bucket)
        to.on_device.copy_(to.on_host, non_blocking=True)
