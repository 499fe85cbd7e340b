"""The batches of a draft loop, computed once for all of its forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.drafting.drafters import DraftInput
from outrider.engine.batch import PackedBatch, pack
from outrider.engine.sampling.noise import Lane
from outrider.engine.sampling.sample import SamplingBatch
from outrider.engine.tree_mask import TreeMask


class DraftForward(Protocol):
    """A model over a paged KV cache, as `outrider.engine.batch.Model`."""

    page_size: int
    max_model_len: int
    device: torch.device

    def forward(self, batch: PackedBatch) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LoopBatches:
    """The catch-up of a loop, and tensors of which each later forward takes some."""

    catch_up: PackedBatch
    sampling: SamplingBatch | None  # of the first draw; None: all rows are greedy
    table: Tensor  # int32 [rows, pages]
    fed: Tensor  # int64 [fed, rows]: positions of the fed tokens, one slot after the other
    slots: Tensor  # int64 [fed, rows]
    seq_lens: Tensor  # int32 [fed, rows]
    numbers: Tensor  # int64: 0, 1, ..., at least as many as a forward feeds
    starts: Callable[[int], Tensor]  # by tokens per row: int32 [rows + 1]
    num_rows: Sequence[int]  # by draw: rows that want it, which come first
    ends: Sequence[int] = ()  # tokens before the first fed one, unless captured

    def sampling_at(self, draw: int) -> SamplingBatch | None:
        """Return the parameters of draw 0, 1, ...; None: all rows are greedy."""
        sampling, n = self.sampling, self.num_rows[draw]
        if sampling is None or draw == 0:
            return sampling
        if n < len(self.table):
            sampling = sampling[:n]
        return replace(sampling, position=sampling.position + draw)

    def step(self, tokens: Tensor, step: int) -> PackedBatch:
        """Return the batch that feeds tokens [rows], drawn by draw `step`."""
        n = self.num_rows[step + 1]
        return self._batch(tokens[:n], self.fed[step, :n], self.slots[step, :n], step, 1)

    def level(self, tokens: Tensor, visible: Tensor, depth: int, num_fed: int) -> PackedBatch:
        """Return the batch that feeds nodes [rows, width] of one level of a tree.

        `visible` [rows, width] are the nodes that each sees, as in a `TreeMask`. `num_fed` nodes
        were fed before.
        """
        width = tokens.shape[1]
        end = num_fed + width
        return replace(
            self._batch(
                tokens.flatten(),
                self.fed[depth].repeat_interleave(width),
                self.slots[num_fed:end].t().flatten(),
                end - 1,
                width,
            ),
            trees=TreeMask(self.seq_lens[0] - 1, visible.flatten()),
        )

    def uneven_level(
        self, tokens: Tensor, visible: Tensor, depth: int, fed: Sequence[int], counts: Sequence[int]
    ) -> PackedBatch:
        """Return the batch that feeds `counts[i]` nodes of row i, after `fed[i]` before them.

        Takes nodes [sum of counts], one row's after the other's. Rows without any are left out.
        Only for loops that run eagerly.
        """
        some = [i for i, num in enumerate(counts) if num]
        query_lens = tuple([counts[i] for i in some])
        ends = [fed[i] + counts[i] for i in some]
        row = np.repeat(some, query_lens)
        number = np.concatenate([np.arange(fed[i], fed[i] + counts[i]) for i in some])
        rows, of_nodes, numbers, last, starts = [
            torch.from_numpy(np.asarray(each)).to(tokens.device)
            for each in (some, row, number, np.subtract(ends, 1), [0, *accumulate(query_lens)])
        ]
        return PackedBatch(
            input_ids=tokens,
            positions=self.fed[depth, of_nodes],
            slot_mapping=self.slots[numbers, of_nodes],
            cu_seqlens_q=starts.to(torch.int32),
            seq_lens=self.seq_lens[last, rows],
            block_table=self.table[rows],
            logits_index=self.numbers[: len(tokens)],
            query_lens=query_lens,
            context_lens=tuple([self.ends[i] + end for i, end in zip(some, ends, strict=True)]),
            page_size=self.catch_up.page_size,
            trees=TreeMask(self.seq_lens[0, rows] - 1, visible),
        )

    def block(self, tokens: Tensor) -> PackedBatch:
        """Return the batch that feeds blocks of tokens [rows, width], each token a position."""
        width = tokens.shape[1]
        return self._batch(
            tokens.flatten(),
            self.fed[:width].t().flatten(),
            self.slots[:width].t().flatten(),
            width - 1,
            width,
        )

    def _batch(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, last: int, width: int
    ) -> PackedBatch:
        """Return a batch of `width` tokens per row, of which `last` is the last slot."""
        first, n = self.catch_up, len(tokens) // width
        context_lens = first.context_lens
        if not first.recorded:
            context_lens = tuple([end + last + 1 for end in self.ends[:n]])
        return PackedBatch(
            input_ids=tokens,
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=self.starts(width)[: n + 1],
            seq_lens=self.seq_lens[last, :n],
            block_table=self.table[:n],
            logits_index=self.numbers[: n * width],
            query_lens=(width,) * n,
            context_lens=context_lens,
            page_size=first.page_size,
            recorded=first.recorded,
            shared=first.shared,
        )


def row_starts(num_rows: int, each: int, device: torch.device) -> Tensor:
    """Return int32 [num_rows + 1]: where rows of so many tokens start, and the end."""
    return torch.arange(0, num_rows * each + 1, each, dtype=torch.int32, device=device)


def eager_batches(
    rows: Sequence[DraftInput],
    model: DraftForward,
    *,
    lead: int = 1,
    lane: Lane = Lane.SHARED,
    num_fed: int | None = None,
) -> LoopBatches:
    """Return the batches of a loop that runs eagerly, without padding.

    Rows are ordered by `wanted`, largest first. Page tables of those that want drafts cover
    `num_fed` tokens more, by default as many as a chain feeds. `lead` is the distance of a drawn
    token from the position that it is drawn at.
    """
    ready = [row for row in rows if row.wanted]
    device, page_size, count = model.device, model.page_size, len(ready)
    ends = [row.end for row in ready]
    wanted = [row.wanted for row in ready]
    if num_fed is None:
        num_fed = wanted[0] - 1
    places = np.asarray(ends, np.int64) + np.arange(num_fed)[:, None]  # [fed, rows]
    table = np.zeros((count, -(-(max(ends) + num_fed) // page_size)), np.int32)
    for i, row in enumerate(ready):
        pages = row.slice.block_table[: table.shape[1]]
        table[i, : len(pages)] = pages
    slots = table[np.arange(count), places // page_size] * page_size + places % page_size
    fed = np.minimum(places, model.max_model_len - 1)  # only nodes of no use lie beyond
    columns = torch.from_numpy(np.stack((fed, slots, places + 1))).to(device, non_blocking=True)
    sampling = None
    if not all(row.sampling.greedy for row in ready):
        lengths = [end + lead - 1 for end in ends]
        params = [row.sampling for row in ready]
        sampling = SamplingBatch.build(params, lengths, device, [lane] * count)
    return LoopBatches(
        catch_up=pack([row.slice for row in rows], page_size, device),
        sampling=sampling,
        table=torch.from_numpy(table).to(device, non_blocking=True),
        fed=columns[0],
        slots=columns[1],
        seq_lens=columns[2].to(torch.int32),
        numbers=torch.arange(count * max(1, num_fed), device=device),
        starts=cache(lambda each: row_starts(count, each, device)),
        num_rows=[sum(n > draw for n in wanted) for draw in range(wanted[0])],
        ends=ends,
    )
