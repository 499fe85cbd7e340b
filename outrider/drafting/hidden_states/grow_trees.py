"""The loop that drafts trees as EAGLE-2 does (Li et al., arXiv 2406.16858).

Level by level the best nodes get children, all of a level in one forward whose mask lets a node see
only its ancestors. The best of all children become the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.confidence import by_row, confidences_of_log_probs
from outrider.drafting.drafters import DraftInput
from outrider.drafting.graphs.batches import LoopBatches, eager_batches
from outrider.drafting.hidden_states.forward import LEAD, HeadForward
from outrider.drafting.hidden_states.trees import Guess, TargetDraws
from outrider.engine.tree_mask import MAX_TREE_NODES

Level = tuple[Tensor, Tensor, Tensor]
"""Nodes of one level: tokens, parents' numbers and scores, each [rows, nodes]."""


def max_fed_nodes(num_nodes: int, width: int, *, captured: bool = False) -> int:
    """Return the most slots that nodes take while a tree of `num_nodes` is drafted.

    The levels of captured loops all have one width.
    """
    per_level = width if captured else min(num_nodes, width)
    return min(MAX_TREE_NODES, per_level * (num_nodes - 1))


def draft_trees(forward: HeadForward, rows: Sequence[DraftInput], width: int) -> list[Guess]:
    """Feed rows, most nodes wanted first, and draft a tree for each that wants one, as one does.

    At most `width` nodes of a level get children, `width` each. A node whose children cannot be
    among the best gets none: where the module is sure, a tree costs what a chain does. Page tables
    must cover `max_fed_nodes` of the largest tree more than the slices. A row feeds nodes of
    its own number, so that its tree does not depend on those beside it.
    """
    with torch.inference_mode():
        wanted = [row.wanted for row in rows if row.wanted]
        width = min(width, wanted[0])
        num_fed = max_fed_nodes(wanted[0], width)
        batches = eager_batches(rows, forward, lead=LEAD, num_fed=num_fed)
        sizes = torch.tensor(wanted, device=forward.device)[:, None]

        def num_parents(levels: Sequence[Level], fed: Sequence[int]) -> list[int]:
            scores = torch.cat([scores for *_, scores in levels], dim=1)
            ordered = scores.sort(dim=1, descending=True).values
            last = ordered.gather(1, (sizes - 1).clamp(max=ordered.shape[1] - 1))
            last = last.masked_fill(sizes > ordered.shape[1], -torch.inf)
            promising = (levels[-1][2] > last).sum(dim=1).tolist()
            return [
                min(each, width, MAX_TREE_NODES - n) for each, n in zip(promising, fed, strict=True)
            ]

        draws = TargetDraws(batches.sampling)
        grown = grow_trees(forward, batches, draws, width, wanted[0], num_parents)
        return read_trees(grown.cpu().numpy(), wanted)


def grow_trees(
    forward: HeadForward,
    batches: LoopBatches,
    draws: TargetDraws,
    width: int,
    num_tokens: int,
    num_parents: Callable[[Sequence[Level], Sequence[int]], Sequence[int]] | None = None,
) -> Tensor:
    """Return the best `num_tokens` nodes of each row, as `best_nodes` does: int32 [rows, 3, nodes].

    `num_parents` returns, given all levels and the numbers of nodes fed so far, how many of the
    latest level's best nodes get children, by row. By default `width` do, and the loop may be
    captured.
    """
    rows = batches.num_rows[0]
    row = torch.arange(rows, device=forward.device)[:, None]
    logits = forward.forward(batches.catch_up)[:rows]
    ids, gains = draws.likeliest(logits[:, None], 0, width)
    tokens, scores = ids[:, 0], gains[:, 0]  # of the latest level's nodes: [rows, nodes]
    levels: list[Level] = [(tokens, torch.full_like(tokens, -1), scores)]
    fan = tokens.shape[1]
    num_nodes, fed = 0, [0] * rows
    visible = row  # of the nodes that were fed last: [rows, fed]
    outputs = row  # the first of each row's outputs of the forward before: [rows, 1]
    for depth in range(num_tokens - 1):
        counts = [fan] * rows if num_parents is None else num_parents(levels, fed)
        if not (count := max(counts)):
            break
        even = len({*zip(counts, fed, strict=True)}) == 1
        places = torch.arange(count, device=forward.device)
        before = fed[0] if even else torch.tensor(fed, device=forward.device)[:, None]
        bits = torch.ones_like(row) << (places + before)
        if depth == 0:  # nodes come the best first
            best = places.expand(rows, -1)
            tokens, scores = tokens[:, :count], scores[:, :count]
            sources, visible = outputs.expand(-1, count), bits
        else:
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
            tokens, scores = tokens.gather(1, best), scores.gather(1, best)
            parents = best // fan
            sources = outputs + parents
            visible = visible.gather(1, parents) | bits
        if even:
            batch = batches.level(tokens, visible, depth, fed[0])
            logits = forward.forward(batch, sources.flatten()).view(rows, count, -1)
            outputs = row * count
        else:
            lens = torch.tensor(counts, device=forward.device)[:, None]
            kept = places < lens
            batch = batches.uneven_level(tokens[kept], visible[kept], depth, fed, counts)
            found = forward.forward(batch, sources[kept])
            logits = found.new_zeros(rows, count, found.shape[1])
            logits[kept] = found
            scores = scores.masked_fill(~kept, -torch.inf)
            outputs = lens.cumsum(dim=0) - lens
        ids, gains = draws.likeliest(logits, depth + 1, width)
        above = (best + num_nodes)[:, :, None].expand_as(ids)
        fed = [n + more for n, more in zip(fed, counts, strict=True)]
        num_nodes += levels[-1][0].shape[1]
        tokens, scores = ids.flatten(1), (scores[:, :, None] + gains).flatten(1)
        levels.append((tokens, above.flatten(1), scores))
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    ints = (tokens.to(torch.int32), parents.to(torch.int32), scores.view(torch.int32))
    return draws.sampler.best_nodes(torch.stack(ints, dim=1), num_tokens)


def read_trees(grown: NDArray[np.int32], wanted: Sequence[int]) -> list[Guess]:
    """Return each row's best nodes of a loop's output, int32 [rows, 3, nodes]."""
    tokens, parents, bits = (np.ascontiguousarray(each) for each in np.moveaxis(grown, 1, 0))
    scores = bits.view(np.float32)
    real = (scores > -np.inf) & (np.arange(scores.shape[1]) < np.array(wanted)[:, None])
    above = np.where(parents < 0, 0.0, np.take_along_axis(scores, np.maximum(parents, 0), 1))
    sizes = real.sum(1).tolist()  # the best come first
    told = confidences_of_log_probs(np.minimum(scores[real] - above[real], 0.0))
    return [
        Guess(row[:size].tolist(), up[:size].tolist(), each)
        for row, up, size, each in zip(tokens, parents, sizes, by_row(told, sizes), strict=True)
    ]
