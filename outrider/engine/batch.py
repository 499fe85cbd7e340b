"""The packed input of one forward: rows of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_tree import depths
from outrider.engine.shared_prefix import SharedPrefix
from outrider.engine.tree_mask import TreeMask, lineages

T = TypeVar("T")

_PROMPT_LEN = 256
"""A number of queries that no attention holds in one tile."""


class RowSlice(NamedTuple):
    """A row's share of one step: `token_ids` in the slots start, start + 1, ... of its pages.

    The row's page table must already cover start + len(token_ids) tokens; from step to step it
    may grow at its end, or be another object. Logits are returned for the last `num_logits` of the
    tokens.

    `parents` make the row's last len(parents) slots, of the tokens of this step and perhaps of some
    before, the nodes of a tree: -1 is what comes before all of them. A node's position follows its
    depth, and it sees no nodes but its ancestors. Empty: a chain, whose positions are its slots.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int
    parents: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Tensors of one forward, on the model's device."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]: page * page_size + offset, where new KV is written
    cu_seqlens_q: Tensor  # int32 [num_rows + 1]
    seq_lens: Tensor  # int32 [num_rows]: slots with KV after this forward (context + new)
    block_table: Tensor  # int32 [num_rows, max_pages], padded with 0
    logits_index: Tensor  # int64 [num_logits]: rows of the hidden state that reach the head
    query_lens: tuple[int, ...]  # per row, on the host
    context_lens: tuple[int, ...]  # per row, seq_lens on the host
    page_size: int
    recorded: bool = False  # in a CUDA graph: its context_lens are only upper bounds
    trees: TreeMask | None = None  # if some row holds a tree
    shared: SharedPrefix | None = None  # if it is known; then all rows have the same length

    @property
    def max_query_len(self) -> int:
        """Return an upper bound of the rows' lengths, by which attention chooses its kernels.

        Eager batches take those of prompts, so that no kernel is compiled while serving.
        """
        return max(self.query_lens) if self.recorded else max(*self.query_lens, _PROMPT_LEN)

    @property
    def max_context_len(self) -> int:
        return max(self.context_lens)


class Model(Protocol):
    """A causal language model over a paged KV cache that it owns."""

    vocab_size: int
    page_size: int

    @property
    def num_pages(self) -> int: ...

    max_model_len: int
    device: torch.device

    def forward(self, batch: PackedBatch) -> Tensor:
        """Write the new keys and values, and return float32 logits [num_logits, vocab_size].

        The tensor may be reused by the next call.
        """

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` int64 [n] to slots `target` [n], in every layer.

        Where two targets are the same, so are their sources.
        """


def pack(rows: Sequence[RowSlice], page_size: int, device: torch.device) -> PackedBatch:
    """Pack rows into one batch; host work is vectorised over tokens."""
    tokens, starts_of_rows, tables, num_logits_of_rows, *_ = zip(*rows, strict=True)
    query_lens = np.array([*map(len, tokens)])
    starts, num_logits = np.array(starts_of_rows), np.array(num_logits_of_rows)
    ends = np.cumsum(query_lens)
    input_ids = np.fromiter(chain.from_iterable(tokens), np.int64, ends[-1])
    row_of_token = np.repeat(np.arange(len(rows)), query_lens)
    places = np.arange(len(input_ids)) - np.repeat(ends - query_lens - starts, query_lens)
    context_lens = starts + query_lens
    num_pages = -(-context_lens // page_size)
    used = map(islice, tables, num_pages.tolist())
    pages = np.fromiter(chain.from_iterable(used), np.int32, num_pages.sum())
    block_table = np.zeros((len(rows), num_pages.max()), np.int32)
    block_table[np.arange(block_table.shape[1]) < num_pages[:, None]] = pages
    slots = block_table[row_of_token, places // page_size].astype(np.int64) * page_size
    slots += places % page_size
    logit_starts = np.repeat(ends - np.cumsum(num_logits), num_logits)
    logits_index = logit_starts + np.arange(int(num_logits.sum()))

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    positions, trees = places, None
    if any(row.parents for row in rows):
        positions, first_nodes, visible = _tree_positions(rows, places, context_lens)
        trees = TreeMask(to_device(first_nodes.astype(np.int32)), to_device(visible))
    return PackedBatch(
        input_ids=to_device(input_ids),
        positions=to_device(positions),
        slot_mapping=to_device(slots),
        cu_seqlens_q=to_device(np.concatenate([[0], ends]).astype(np.int32)),
        seq_lens=to_device(context_lens.astype(np.int32)),
        block_table=to_device(block_table),
        logits_index=to_device(logits_index),
        query_lens=tuple(query_lens.tolist()),
        context_lens=tuple(context_lens.tolist()),
        page_size=page_size,
        trees=trees,
    )


def _tree_positions(
    rows: Sequence[RowSlice], places: NDArray[np.int64], context_lens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return positions [tokens], and the starts [rows] and visible [tokens] of a `TreeMask`.

    `places` [tokens] are the tokens' slots, counted from their rows' first.
    """
    positions, visible = places.copy(), np.zeros_like(places)
    starts, end = context_lens.copy(), 0
    for i, row in enumerate(rows):
        end += len(row.token_ids)
        if row.parents:
            starts[i] -= len(row.parents)
            new = min(len(row.parents), len(row.token_ids))
            positions[end - new : end] = starts[i] + np.array(depths(row.parents)[-new:])
            visible[end - new : end] = lineages(row.parents)[-new:]
    return positions, starts, visible


def grouped(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items in order, in groups of at most `most` in total, or of one item."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
