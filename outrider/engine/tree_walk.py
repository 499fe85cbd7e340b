"""Rows of one step side by side, and the walk along their trees by what the target chose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.step import ScheduledRow
from outrider.engine.tree_mask import chain_parents, depths
from outrider.engine.verifier import verify_trees


class Walk(NamedTuple):
    """What came of rows of which some carry a tree; on the model's device."""

    tokens: Tensor
    """int64 [rows, 2 + depth]: per row, nodes accepted, then what the target chose along them and
    after the last, padded."""
    order: Tensor  # int64 [num_logits]: per row, the logits along the path come first
    source: Tensor  # int64 [m]: where the keys of the path are,
    target: Tensor  # and the slots that they have in the text; all others are their own source


def walk_trees(drawn: Tensor, rows: Sequence[ScheduledRow], page_size: int) -> Walk:
    """Walks along every row's tree, or chain. `drawn` int64 [num_logits], of these rows."""
    device = drawn.device
    parents = [row.slice.parents or chain_parents(len(row.draft)) for row in rows]
    depth = max([max(depths(each), default=-1) for each in parents]) + 1
    counts = [row.slice.num_logits for row in rows]
    width = max(counts)
    slots = padded([_slots(row, page_size) for row in rows], width - 1, None)
    choices = per_row(drawn, counts)
    path = verify_trees(
        padded([row.draft for row in rows], width - 1, -1).to(device, non_blocking=True),
        padded(parents, width - 1, -1).to(device, non_blocking=True),
        choices,
        depth,
    )
    at = torch.nn.functional.pad(path + 1, (1, 0))  # [rows, 1 + depth]; after the end: anything
    accepted = (path >= 0).sum(dim=1, keepdim=True)
    starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))
    place = torch.arange(len(row_of)) - starts[row_of]
    row_of, place, starts = (
        each.to(device, non_blocking=True) for each in (row_of, place.clamp(max=depth), starts)
    )
    slots = slots.to(device, non_blocking=True)
    target = slots[:, :depth]
    source = torch.where(path >= 0, slots.gather(1, path.clamp(min=0)), target)
    return Walk(
        tokens=torch.cat((accepted, choices.gather(1, at)), dim=1),
        order=starts[row_of] + at[row_of, place],
        source=source.flatten(),
        target=target.flatten(),
    )


def per_row(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Values [sum of counts] as [rows, most of them]; a shorter row is filled up with anything."""
    width = max(counts)
    if min(counts) < width:
        starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
        at = (starts[:, None] + torch.arange(width)).clamp(max=len(values) - 1)
        values = values[at.to(values.device, non_blocking=True)]
    return values.view(len(counts), width)


def padded(rows: Iterable[Sequence[int]], width: int, value: int | None) -> Tensor:
    """int64 [rows, width], shorter rows filled up with `value`; None: with their last value."""
    filled = [(*row, *(row[-1] if value is None else value,) * (width - len(row))) for row in rows]
    return torch.tensor(filled, dtype=torch.int64)


def _slots(row: ScheduledRow, page_size: int) -> list[int]:
    """The slots of the row's nodes; of a row without any, that of its last token."""
    table = row.slice.block_table
    end = row.slice.start + len(row.slice.token_ids)
    places = range(end - max(1, len(row.draft)), end)
    return [table[place // page_size] * page_size + place % page_size for place in places]
