"""The inputs of a recorded draft loop: one packed buffer, brought to the device by one copy.

The host writes only what it alone knows: each row's tokens to catch up, where they begin, how it
samples, its pages. Positions and slots of every forward are computed on the device.

A row with fewer tokens than the loop takes is filled up behind them, a batch with fewer rows by
whole rows. What fills a row up lies behind its text: on its own pages, where it is overwritten
before it can be seen, or on the scratch page, which also takes the rows that fill a batch up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import pack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batch import PackedBatch, RowSlice
from outrider.engine.sampling.coupled import SamplingBatch, seed_keys
from outrider.engine.shared_prefix import SharedPrefix
from outrider.engine.tree_mask import TreeMask
from outrider.params import SamplingParams

# Columns of a row's header; the tokens to catch up follow.
_START, _COUNT, _SOURCE, _TARGET, _SAMPLING = range(5)
_TEMPERATURE, _, _, _TOP_K, _KEYS = range(_SAMPLING, _SAMPLING + 5)  # then top_p and min_p
_TOKENS = _KEYS + 2

_MAX_COLUMNS = 4096  # sessions whose sampling is remembered
_SHARING_ROWS = 128  # of branches, from which on it pays to read shared pages once


@dataclass(frozen=True, slots=True)
class LoopShape:
    """What a recorded loop is made for."""

    rows: int
    query_len: int  # tokens to catch up per row
    num_tokens: int  # draft tokens per row
    fanout: int = 0  # candidates per place; 0: none, and the last draft token is not fed
    cut: bool = False  # some row has top_k, top_p or min_p, and candidates or trees are made
    width: int = 1  # nodes that a step feeds per row: more than 1 for trees

    @property
    def num_steps(self) -> int:
        """Forwards of one token after the catch-up."""
        return self.num_tokens if self.fanout else self.num_tokens - 1

    @property
    def num_fed(self) -> int:
        """Slots per row that the steps write."""
        return self.num_steps * self.width


@dataclass(frozen=True, slots=True)
class LoopRows:
    """What the host wrote of a loop's rows, on the device."""

    tokens: Tensor  # int64 [rows, query_len]: to catch up
    start: Tensor  # int64 [rows]: where they begin
    counts: Tensor  # int64 [rows]: how many of them are the row's own
    sampling: SamplingBatch  # for the token after the catch-up
    source: Tensor  # int64 [rows]: pages to copy first
    target: Tensor  # int64 [rows]


@dataclass(frozen=True, slots=True)
class LoopBatches:
    """The device's side: tensors that a recorded loop computes anew from the buffer."""

    rows: LoopRows
    catch_up: PackedBatch
    fed: Tensor  # int64 [fed, rows]: positions of what the steps feed, one slot after the other
    slots: Tensor  # int64 [fed, rows]
    seq_lens: Tensor  # int32 [fed, rows]
    starts: Tensor  # int32 [rows + 1]: of what a step feeds
    numbers: Tensor  # int64: 0, 1, ..., as many as a step feeds

    def step(self, tokens: Tensor, step: int) -> tuple[PackedBatch, SamplingBatch]:
        """Step `step` (from 0): it feeds `tokens` int64 [rows]; and how the next are drawn."""
        rows, first = len(tokens), self.catch_up
        batch = PackedBatch(
            input_ids=tokens,
            positions=self.fed[step],
            slot_mapping=self.slots[step],
            cu_seqlens_q=self.starts,
            seq_lens=self.seq_lens[step],
            block_table=first.block_table,
            logits_index=self.numbers,
            query_lens=(1,) * rows,
            context_lens=first.context_lens,
            page_size=first.page_size,
            recorded=True,
            shared=first.shared,
        )
        sampling = self.rows.sampling
        return batch, replace(sampling, position=sampling.position + (step + 1))

    def level(self, tokens: Tensor, visible: Tensor, step: int) -> PackedBatch:
        """The batch of `step` for trees: nodes int64 [rows, width], all of one level.

        `visible` int64 [rows, width] is what they see of the nodes, as a `TreeMask` says it.
        """
        rows, width = tokens.shape
        first = self.catch_up
        fed = slice(step * width, (step + 1) * width)
        starts = self.seq_lens[0] - 1  # the first node's slot
        return PackedBatch(
            input_ids=tokens.flatten(),
            positions=self.fed[step].repeat_interleave(width),
            slot_mapping=self.slots[fed].t().flatten(),
            cu_seqlens_q=self.starts,
            seq_lens=self.seq_lens[(step + 1) * width - 1],
            block_table=first.block_table,
            logits_index=self.numbers,
            query_lens=(width,) * rows,
            context_lens=first.context_lens,
            page_size=first.page_size,
            recorded=True,
            trees=TreeMask(starts, visible.flatten()),
        )


class LoopInputs:
    """The buffer, large enough for `shapes`, on the host (pinned for CUDA) and on the device."""

    def __init__(
        self,
        shapes: Sequence[LoopShape],
        *,
        max_model_len: int,
        page_size: int,
        scratch_page: int,
        device: torch.device,
        lead: int = 1,
    ) -> None:
        """`lead`: how far a drawn token is from the position that it is drawn at."""
        self.device = device
        self._lead = lead
        self._max_model_len = max_model_len
        self._page_size = page_size
        self._scratch_page = scratch_page
        longest = max_model_len + max(s.query_len + s.num_fed for s in shapes)
        self._table_width = -(-longest // page_size)
        size = 1 + max(s.rows * (_TOKENS + s.query_len + self._table_width) for s in shapes)
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._ints = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        # What a loop need not compute: a launch takes as long as all that is in it.
        most = max(max(s.rows * s.width, s.query_len, s.num_fed) for s in shapes)
        self._numbers = torch.arange(max(most, self._table_width), device=device)
        self._starts = {  # of rows of so many tokens, one after another
            (shape.rows, each): torch.arange(
                0, shape.rows * each + 1, each, dtype=torch.int32, device=device
            )
            for shape in shapes
            for each in (shape.query_len, shape.width)
        }
        # By the parameters' id, which is theirs as long as they are kept: hashing them takes longer
        # than all else of a row.
        self._columns: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}

    def fill(
        self,
        shape: LoopShape,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Write the rows and enqueues the copy to the device; nothing may be copying meanwhile."""
        no_page = array("i", [self._scratch_page])
        longest = max([row.start + len(row.token_ids) for row in slices], default=1)
        num_pages = -(-(longest + shape.num_fed) // self._page_size)
        num_inert = shape.rows - len(slices)
        pairs = [*copies, *[(self._scratch_page,) * 2] * (shape.rows - len(copies))]
        rows = [num_pages]
        padding = [(0,) * (shape.query_len - count) for count in range(shape.query_len + 1)]
        for row, params, pair in zip(slices, sampling, pairs, strict=False):
            tokens = row.token_ids
            count = len(tokens)
            columns = self._sampling_columns(params)
            rows += (row.start, count, *pair, *columns, *tokens, *padding[count])
        inert = (0,) * (_TOKENS - _SAMPLING + shape.query_len)
        for pair in pairs[len(slices) :]:
            rows += (0, 1, *pair, *inert)
        # Packed, then appended to: to write into a part of an array takes longer.
        ints = array("i", pack(f"{len(rows)}i", *rows))
        for row in slices:
            pages = row.block_table[:num_pages]
            ints.extend(pages)
            ints.extend(no_page * (num_pages - len(pages)))
        ints.extend(no_page * (num_pages * num_inert))
        self._ints[: len(ints)] = ints
        self._device[: len(ints)].copy_(self._host[: len(ints)], non_blocking=True)

    def follow(self, shape: LoopShape, count: int, verify_output: Tensor) -> None:
        """Enqueues what makes the first `count` rows go on from the verdicts of a step.

        They were filled as rows of two tokens that begin behind their line: how many guesses of
        theirs are in the cache, and 0. `verify_output` is of the same rows.
        """
        rows = self._device[1 : self._end_of_rows(shape)].view(shape.rows, -1)[:count]
        accepted, line = verify_output[:count, 0], rows[:, _TOKENS].clone()
        kept = torch.minimum(accepted, line)
        chosen = kept[:, None] + self._numbers[:2]  # the text's new tokens that are to be fed
        last = verify_output.shape[1] - 2
        tokens = verify_output[:count, 1:].gather(1, chosen.clamp(max=last))
        rows[:, _TOKENS : _TOKENS + 2] = tokens.masked_fill(chosen > accepted[:, None], 0)
        rows[:, _START] += kept - line
        rows[:, _COUNT] = accepted + 1 - kept

    def rows(self, shape: LoopShape) -> LoopRows:
        """What a loop's buffer holds but for the pages. May be recorded."""
        ints = self._device[1 : self._end_of_rows(shape)].view(shape.rows, -1)
        header, floats = ints.to(torch.int64), ints.view(torch.float32)
        start, counts = header[:, _START], header[:, _COUNT]
        temperature, top_p, min_p = floats[:, _TEMPERATURE:_TOP_K].t().contiguous()
        return LoopRows(
            tokens=header[:, _TOKENS:],
            start=start,
            counts=counts,
            sampling=SamplingBatch(
                temperature=temperature,
                top_k=header[:, _TOP_K].contiguous(),
                top_p=top_p,
                min_p=min_p,
                seed=(header[:, _KEYS:_TOKENS] & 0xFFFFFFFF).contiguous(),
                position=start + counts + (self._lead - 1),
                all_greedy=False,
                any_greedy=True,
                any_sorted=shape.cut,
                any_min_p=shape.cut,
            ),
            source=header[:, _SOURCE],
            target=header[:, _TARGET],
        )

    def batches(self, shape: LoopShape) -> LoopBatches:
        """The tensors of a loop, computed from the buffer on the device. May be recorded."""
        rows, query_len = shape.rows, shape.query_len
        known = self.rows(shape)
        start, counts = known.start, known.counts
        table = self._table(rows, self._end_of_rows(shape))
        positions = start[:, None] + self._numbers[:query_len]
        starts = self._starts[rows, query_len]
        seq_lens = (start + query_len).to(torch.int32)
        shared = None
        if shape.fanout and rows >= _SHARING_ROWS:
            shared = SharedPrefix.of(table, seq_lens + shape.num_fed, self._page_size)
        catch_up = PackedBatch(
            input_ids=known.tokens.flatten(),
            positions=self._clamped(positions).flatten(),
            slot_mapping=self._slots(table, positions).flatten(),
            cu_seqlens_q=starts,
            seq_lens=seq_lens,
            block_table=table,
            logits_index=starts[:-1] + (counts - 1),
            query_lens=(query_len,) * rows,
            context_lens=(self._table_width * self._page_size,) * rows,
            page_size=self._page_size,
            recorded=True,
            shared=shared,
        )
        fed = start + counts + self._numbers[: shape.num_fed, None]
        return LoopBatches(
            rows=known,
            catch_up=catch_up,
            fed=self._clamped(fed),
            slots=self._slots(table, fed.t()).t().contiguous(),
            seq_lens=(fed + 1).to(torch.int32),
            starts=self._starts[rows, shape.width],
            numbers=self._numbers[: rows * shape.width],
        )

    def _sampling_columns(self, params: SamplingParams) -> tuple[int, ...]:
        known = self._columns.get(id(params))
        if known is None:
            if len(self._columns) >= _MAX_COLUMNS:
                self._columns.clear()
            known = self._columns[id(params)] = params, _sampling_columns(params)
        return known[1]

    def _end_of_rows(self, shape: LoopShape) -> int:
        return 1 + shape.rows * (_TOKENS + shape.query_len)

    def _table(self, rows: int, begin: int) -> Tensor:
        """int32 [rows, table width]: the rows' pages in the buffer, then the scratch page."""
        flat, column = self._device, self._numbers[: self._table_width]
        num_pages = flat[0]
        at = begin + self._numbers[:rows, None] * num_pages
        at = at + torch.minimum(column, num_pages - 1)
        return flat[at].masked_fill(column >= num_pages, self._scratch_page)

    def _slots(self, table: Tensor, positions: Tensor) -> Tensor:
        """int64 [rows, n] of positions [rows, n]."""
        pages = table.gather(1, positions // self._page_size)
        return pages.to(torch.int64) * self._page_size + positions % self._page_size

    def _clamped(self, positions: Tensor) -> Tensor:
        """Behind the longest context there are no positions; only inert tokens get there."""
        return positions.clamp(max=self._max_model_len - 1)


def _sampling_columns(params: SamplingParams) -> tuple[int, ...]:
    """The columns from `_SAMPLING` to `_TOKENS`, as the bits of int32."""
    floats = np.array([params.temperature, params.top_p, params.min_p], np.float32)
    keys: NDArray[np.int32] = seed_keys([params.seed]).numpy().astype(np.uint32).view(np.int32)
    top_k = min(params.top_k, 2**31 - 1)
    return (*floats.view(np.int32).tolist(), top_k, *keys[0].tolist())
