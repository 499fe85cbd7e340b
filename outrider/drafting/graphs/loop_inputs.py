"""Inputs of captured draft loops: one packed buffer, which one copy brings to the device.

The host writes what it alone knows: each row's tokens to catch up, their position, the sampling
parameters and the pages. Positions and slots of every forward are computed on the device.

Padding tokens fill up a row with fewer tokens than the loop takes, padding rows a batch with fewer
rows. Padding tokens lie behind the row's text: on its own pages, where they are overwritten before
anything reads them, or on the scratch page, which padding rows use, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import pack

import numpy as np
import torch
from torch import Tensor

from outrider.drafting.drafters import FedRows, StatesBehind
from outrider.drafting.graphs.batches import LoopBatches, row_starts
from outrider.engine.batch import PackedBatch, RowSlice
from outrider.engine.graphs.staging import PageLayout, Staging
from outrider.engine.sampling.noise import keys_of_seed
from outrider.engine.sampling.sample import SamplingBatch
from outrider.engine.shared_prefix import SharedPrefix
from outrider.params import SamplingParams

# Columns of a row's header; the tokens to catch up follow. Zeros are valid in all of them.
_START, _LAST, _FIRST, _SOURCE, _TARGET, _SAMPLING = range(6)
_TEMPERATURE, _, _, _TOP_K, _KEYS = range(_SAMPLING, _SAMPLING + 5)  # then top_p and min_p
_TOKENS = _KEYS + 2

_MAX_COLUMNS = 4096  # sessions whose sampling columns are kept
_SHARING_ROWS = 96  # branches from which on a common read of shared pages pays


@dataclass(frozen=True, slots=True)
class LoopShape:
    """The size of a captured loop."""

    rows: int
    query_len: int  # tokens to catch up per row
    num_tokens: int  # draft tokens per row
    fanout: int = 0  # candidates per place; 0: none, and the last draft token is not fed
    cut: bool = False  # some row has top_k, top_p or min_p, and candidates or trees are made
    width: int = 1  # nodes that a step feeds per row: more than 1 for trees
    slots: int = 0  # of a block, which one forward feeds past the catch-up; 0: there are steps

    @property
    def num_steps(self) -> int:
        """Forwards after the catch-up."""
        if self.slots:
            return 1
        return self.num_tokens if self.fanout else self.num_tokens - 1

    @property
    def num_fed(self) -> int:
        """Slots per row that the forwards after the catch-up write."""
        return self.slots or self.num_steps * self.width

    @property
    def further(self) -> LoopShape:
        """The loop that feeds one token more of each row and finds the candidates after it."""
        return LoopShape(self.rows, 1, 0, self.fanout, self.cut)

    @property
    def cost(self) -> tuple[int, int, int, bool]:
        """Order of costs: one more forward costs more than any number of rows."""
        tokens = self.rows * (self.query_len + self.num_fed)
        return self.num_steps, tokens, self.fanout, self.cut


def make_shapes(
    *,
    rows: Iterable[int],
    query_lens: Sequence[int],
    num_tokens: Sequence[int],
    fanout: int = 0,
    cut: bool = False,
) -> list[LoopShape]:
    """Return loops for all combinations."""
    return [
        LoopShape(n, query_len, k, fanout, cut)
        for n in rows
        for query_len in query_lens
        for k in num_tokens
    ]


@dataclass(frozen=True, slots=True)
class LoopRows:
    """The host's part of a loop's rows, on the device."""

    tokens: Tensor  # int64 [rows, query_len]: to catch up
    start: Tensor  # int64 [rows]: their first position
    last: Tensor  # int64 [rows]: the number of the last one that is no padding
    sampling: SamplingBatch  # for the token after the catch-up
    source: Tensor  # int64 [rows]: pages to copy first
    target: Tensor  # int64 [rows]
    features: Tensor | None  # bfloat16 [rows * query_len, width]: the target's states of the tokens


class LoopInputs:
    """Staging of a loop's inputs, shared by all shapes.

    `lead` is the distance of a drawn token from the position that it is drawn at. With a
    `feature_width` rows come with states of the target of that width.
    """

    def __init__(
        self, shapes: Sequence[LoopShape], layout: PageLayout, lead: int = 1, feature_width: int = 0
    ) -> None:
        self.device = device = layout.device
        self._layout = layout
        self._lead = lead
        longest = layout.max_model_len + max(s.query_len + s.num_fed for s in shapes)
        self._table_width = -(-longest // layout.page_size)
        size = 1 + max(s.rows * (_TOKENS + s.query_len + self._table_width) for s in shapes)
        self._staging = Staging({"ints": (torch.int32, (size,))}, device)
        self._ints = self._staging.array("ints")
        self._device = self._staging.device("ints")
        self._states: Staging | None = None  # of the target, of one row after the other
        if feature_width:
            tokens = max(s.rows * s.query_len for s in shapes)
            self._states = Staging({"all": (torch.bfloat16, (tokens, feature_width))}, device)
        # Constants are made here, because all work of a loop adds to the time of its launch.
        most = max(max(s.rows * max(s.width, s.slots), s.query_len, 1 + s.num_fed) for s in shapes)
        self._numbers = torch.arange(max(most, self._table_width), device=device)
        self._starts = {
            (shape.rows, each): row_starts(shape.rows, each, device)
            for shape in shapes
            for each in (shape.query_len, shape.width, 1, *([shape.slots] if shape.slots else []))
        }
        self._copies_nothing = torch.tensor([layout.scratch_page] * 2, dtype=torch.int32).to(device)
        # By the parameters' id, valid while they are kept: a hash takes longer than a whole row.
        self._columns: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}

    def fill(self, shape: LoopShape, fed: FedRows, copies: Sequence[tuple[int, int]] = ()) -> None:
        """Write the rows and enqueue their copy to the device, after the copy before has ended."""
        slices = fed.slices
        scratch_page, page_size = self._layout.scratch_page, self._layout.page_size
        no_page = array("i", [scratch_page])
        longest = max([row.start + len(row.token_ids) for row in slices], default=1)
        num_pages = -(-(longest + shape.num_fed + bool(shape.fanout)) // page_size)
        pairs = [*copies, *[(scratch_page,) * 2] * (shape.rows - len(copies))]
        counts = [len(row.token_ids) for row in slices]
        firsts = fed.firsts or accumulate(counts, initial=0)
        rows = [num_pages]
        padding = [(0,) * (shape.query_len - count) for count in range(shape.query_len + 1)]
        columns = slices, counts, firsts, fed.sampling, pairs
        for row, count, first, params, pair in zip(*columns, strict=False):
            sampled = self._sampling_columns(params)
            rows += (row.start, count - 1, first, *pair, *sampled, *row.token_ids, *padding[count])
        padding_row = (0,) * (_TOKENS - _SAMPLING + shape.query_len)
        for pair in pairs[len(slices) :]:
            rows += (0, 0, 0, *pair, *padding_row)
        # Packing and appending is faster than writing into parts of an array.
        ints = array("i", pack(f"{len(rows)}i", *rows))
        for row in slices:
            pages = row.block_table[:num_pages]
            ints.extend(pages)
            ints.extend(no_page * (num_pages - len(pages)))
        ints.extend(no_page * (num_pages * (shape.rows - len(slices))))
        self._num_pages = num_pages
        self._staging.await_copy()
        self._ints[: len(ints)] = ints
        self._staging.send("ints", len(ints))

    def fill_features(self, features: Sequence[Tensor]) -> None:
        """Write the rows' states, bfloat16 [any, width] each on the host, and enqueue their copy.

        No copy may be in progress.
        """
        assert self._states is not None
        end = sum(map(len, features))
        torch.cat(list(features), out=self._states.host("all")[:end])
        self._states.send("all", end)

    def take_states(self, states: StatesBehind, counts: Sequence[int]) -> Sequence[int] | None:
        """Enqueue the copy of so many states of each row; return `FedRows.firsts` of them."""
        assert self._states is not None
        buffer, (rows, firsts) = self._states.device("all"), states
        ends = [first + count for first, count in zip(firsts, counts, strict=True)]
        if (end := max(ends)) <= len(buffer):  # mostly: few belong to other rows
            buffer[:end] = rows[:end]
            return firsts
        parts = [rows[first:end] for first, end in zip(firsts, ends, strict=True)]
        torch.cat(parts, out=buffer[: sum(counts)])
        return None

    def clear(self) -> None:
        """Write zeros, which are valid rows of any shape: greedy, and on the scratch page."""
        self._ints.fill(0)
        self._num_pages = 0
        self._staging.send("ints", len(self._ints))

    def follow(self, shape: LoopShape, slices: Sequence[RowSlice], verify_output: Tensor) -> None:
        """Enqueue the update by which the rows of `slices` go on from a step's output.

        They were filled in with places for the step's tokens: how many guesses of theirs are in the
        cache, which are not fed again if they are accepted, and zeros. They start behind these
        guesses. `verify_output` is of the same rows.
        """
        count, most = len(slices), max([len(row.token_ids) for row in slices])
        rows = self._device[1 : self._end_of_rows(shape)].view(shape.rows, -1)[:count]
        accepted = verify_output[:count, 0]
        if not any(row.token_ids[0] for row in slices):  # without guesses it takes fewer launches
            tokens = verify_output[:count, 1 : 1 + most]
            behind = self._numbers[: tokens.shape[1]] > accepted[:, None]
            rows[:, _TOKENS : _TOKENS + tokens.shape[1]] = tokens.masked_fill(behind, 0)
            rows[:, _LAST] = accepted
            return
        line = rows[:, _TOKENS].clone()
        kept = torch.minimum(accepted, line)
        chosen = kept[:, None] + self._numbers[:most]  # the text's new tokens that are to be fed
        last = verify_output.shape[1] - 2
        tokens = verify_output[:count, 1:].gather(1, chosen.clamp(max=last))
        rows[:, _TOKENS : _TOKENS + most] = tokens.masked_fill(chosen > accepted[:, None], 0)
        rows[:, _START] += kept - line
        rows[:, _LAST] = accepted - kept

    def go_further(self, shape: LoopShape, tokens: Tensor) -> None:
        """Enqueue the update by which the rows of a loop feed `tokens` [rows] after their chains.

        The buffer is that of `shape.further` then.
        """
        flat, end = self._device, self._end_of_rows(shape)
        header = flat[1:end].view(shape.rows, -1)[:, : _TOKENS + 1].clone()
        header[:, _START] += header[:, _LAST] + (shape.num_tokens + 1)
        header[:, _LAST : _FIRST + 1] = 0
        header[:, _SOURCE : _TARGET + 1] = self._copies_nothing
        header[:, _TOKENS] = tokens
        new_end = self._end_of_rows(shape.further)
        if new_end < end:
            pages = flat[end : end + shape.rows * self._num_pages].clone()
            flat[new_end : new_end + len(pages)] = pages
        flat[1:new_end] = header.flatten()

    def rows(self, shape: LoopShape) -> LoopRows:
        """Return the buffer's rows but for their pages. May be captured."""
        ints = self._device[1 : self._end_of_rows(shape)].view(shape.rows, -1)
        header, floats = ints.to(torch.int64), ints.view(torch.float32)
        start, last = header[:, _START], header[:, _LAST]
        temperature, top_p, min_p = floats[:, _TEMPERATURE:_TOP_K].t().contiguous()
        features = None
        if self._states is not None:  # padding tokens have those of their row's last token
            place = torch.minimum(self._numbers[: shape.query_len], last[:, None])
            places = (header[:, _FIRST, None] + place).flatten()
            features = self._states.device("all").index_select(0, places)
        return LoopRows(
            tokens=header[:, _TOKENS:],
            start=start,
            last=last,
            sampling=SamplingBatch(
                temperature=temperature,
                top_k=header[:, _TOP_K].contiguous(),
                top_p=top_p,
                min_p=min_p,
                seed=(header[:, _KEYS:_TOKENS] & 0xFFFFFFFF).contiguous(),
                position=start + last + self._lead,
                all_greedy=False,
                any_greedy=True,
                any_sorted=shape.cut,
                any_min_p=shape.cut,
            ),
            source=header[:, _SOURCE],
            target=header[:, _TARGET],
            features=features,
        )

    def batches(self, shape: LoopShape, rows: LoopRows) -> LoopBatches:
        """Compute a loop's tensors from the buffer on the device. May be captured."""
        page_size, query_len = self._layout.page_size, shape.query_len
        table = self._table(shape)
        positions = rows.start[:, None] + self._numbers[:query_len]
        starts = self._starts[shape.rows, query_len]
        seq_lens = (rows.start + query_len).to(torch.int32)
        shared = None
        if shape.fanout and shape.rows >= _SHARING_ROWS:
            shared = SharedPrefix.of(table, seq_lens + shape.num_fed, page_size)
        catch_up = PackedBatch(
            input_ids=rows.tokens.flatten(),
            positions=self._clamped(positions).flatten(),
            slot_mapping=self._slots(table, positions).flatten(),
            cu_seqlens_q=starts,
            seq_lens=seq_lens,
            block_table=table,
            logits_index=starts[:-1] + rows.last,
            query_lens=(query_len,) * shape.rows,
            context_lens=(self._table_width * page_size,) * shape.rows,
            page_size=page_size,
            recorded=True,
            shared=shared,
        )
        fed = rows.start + rows.last + self._numbers[1 : 1 + shape.num_fed, None]
        return LoopBatches(
            catch_up=catch_up,
            sampling=rows.sampling,
            table=table,
            fed=self._clamped(fed),
            slots=self._slots(table, fed.t()).t().contiguous(),
            seq_lens=(fed + 1).to(torch.int32),
            numbers=self._numbers,
            starts=lambda each: self._starts[shape.rows, each],
            num_rows=(shape.rows,) * (shape.num_steps + 1),
        )

    def _sampling_columns(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the columns from `_SAMPLING` to `_TOKENS`, as the bits of int32."""
        known = self._columns.get(id(params))
        if known is None:
            if len(self._columns) >= _MAX_COLUMNS:
                self._columns.clear()
            floats = np.array([params.temperature, params.top_p, params.min_p], np.float32)
            keys = np.array(keys_of_seed(params.seed)).astype(np.uint32).view(np.int32)
            top_k = min(params.top_k, 2**31 - 1)
            columns = (*floats.view(np.int32).tolist(), top_k, *keys.tolist())
            known = self._columns[id(params)] = params, columns
        return known[1]

    def _end_of_rows(self, shape: LoopShape) -> int:
        return 1 + shape.rows * (_TOKENS + shape.query_len)

    def _table(self, shape: LoopShape) -> Tensor:
        """Return int32 [rows, table width]: the rows' pages, then the scratch page."""
        flat, column = self._device, self._numbers[: self._table_width]
        num_pages = flat[0]
        at = self._end_of_rows(shape) + self._numbers[: shape.rows, None] * num_pages
        at = at + torch.minimum(column, num_pages - 1)
        return flat[at].masked_fill(column >= num_pages, self._layout.scratch_page)

    def _slots(self, table: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of positions: int64 [rows, n]."""
        page_size = self._layout.page_size
        pages = table.gather(1, positions // page_size)
        return pages.to(torch.int64) * page_size + positions % page_size

    def _clamped(self, positions: Tensor) -> Tensor:
        """Clamp padding tokens, which alone lie behind the longest context."""
        return positions.clamp(max=self._layout.max_model_len - 1)
