"""Walk along the drafted trees of a step by the target's choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.draft_tree import chain_parents, depths
from outrider.engine.sampling.verify import padded, verify_trees
from outrider.engine.step import ScheduledRow


class Walk(NamedTuple):
    """Paths along n trees, on the device of what was drawn."""

    tokens: Tensor
    """int64 [n, 2 + depth]: nodes accepted, then the target's choices along the path, padded."""
    at: Tensor  # int64 [n, 1 + depth]: the index of these choices among the tree's, padded
    source: Tensor  # int64 [n * depth]: slots of the path's nodes
    target: Tensor  # int64 [n * depth]: their slots in the text; other nodes stay where they are


def walk(drafts: Tensor, parents: Tensor, choices: Tensor, slots: Tensor, depth: int) -> Walk:
    """Walk along n trees whose nodes have `slots` int64 [n, k].

    The slots of smaller trees are padded with slots that may be written what they hold.
    """
    path = verify_trees(drafts, parents, choices, depth)
    at = torch.nn.functional.pad(path + 1, (1, 0))
    accepted = (path >= 0).sum(dim=1, keepdim=True)
    target = slots[:, :depth]
    source = torch.where(path >= 0, slots.gather(1, path.clamp(min=0)), target)
    tokens = torch.cat((accepted, choices.gather(1, at)), dim=1)
    return Walk(tokens, at, source.flatten(), target.flatten())


def walk_trees(drawn: Tensor, rows: Sequence[ScheduledRow], page_size: int) -> Walk:
    """Walk along every row's tree, or chain; `drawn` int64 [num_logits]."""
    device = drawn.device
    parents = [row.slice.parents or chain_parents(len(row.draft)) for row in rows]
    counts = [row.slice.num_logits for row in rows]
    width = max(counts) - 1
    packed = (
        padded([row.draft for row in rows], width, -1),
        padded(parents, width, -1),
        padded([_slots(row, page_size) for row in rows], width, None),
    )
    drafts, parents_, slots = (each.to(device, non_blocking=True) for each in packed)
    depth = 1 + max([max(depths(each), default=-1) for each in parents])
    return walk(drafts, parents_, per_row(drawn, counts), slots, depth)


def path_order(at: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the order of logits in which each row begins with its path: int64 [sum of counts].

    `at` is `Walk.at`.
    """
    lens = torch.tensor(counts)
    starts = lens.cumsum(0) - lens
    row_of = torch.arange(len(counts)).repeat_interleave(lens)
    place = (torch.arange(len(row_of)) - starts[row_of]).clamp(max=at.shape[1] - 1)
    row_of, place, first = (
        each.to(at.device, non_blocking=True) for each in (row_of, place, starts[row_of])
    )
    return first + at[row_of, place]


def per_row(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return values [sum of counts] as [rows, max(counts)], padded with anything."""
    width = max(counts)
    if min(counts) < width:
        starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
        at = (starts[:, None] + torch.arange(width)).clamp(max=len(values) - 1)
        values = values[at.to(values.device, non_blocking=True)]
    return values.view(len(counts), width)


def _slots(row: ScheduledRow, page_size: int) -> list[int]:
    """Return the slots of the row's nodes, or of its last token if it has none."""
    table = row.slice.block_table
    end = row.slice.start + len(row.slice.token_ids)
    places = range(end - max(1, len(row.draft)), end)
    return [table[place // page_size] * page_size + place % page_size for place in places]
