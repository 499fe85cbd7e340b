"""The forwards of a drafting round that makes trees: EAGLE-2's (Li et al., arXiv 2406.16858).

Level by level the best nodes get children, all of a level in one forward whose mask lets a node see
only its ancestors. Of all children that were looked at the best become the draft. A node whose
children cannot be among these gets none: where the module is sure, a tree costs what a chain does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.draft_model.chains import ReadyRow
from outrider.drafting.hidden_states.forward import HeadForward
from outrider.drafting.hidden_states.trees import Nodes, TargetDraws, best_nodes
from outrider.engine.batch import RowSlice, pack
from outrider.engine.tree_mask import MAX_TREE_NODES


def max_fed_nodes(num_nodes: int, width: int, *, recorded: bool = False) -> int:
    """Slots that nodes take at most while a tree of `num_nodes` is drafted.

    `recorded`: by a loop, whose levels are all of one width.
    """
    per_level = width if recorded else min(num_nodes, width)
    return min(MAX_TREE_NODES, per_level * (num_nodes - 1))


def draft_trees(
    forward: HeadForward, slices: Sequence[RowSlice], ready: Sequence[ReadyRow], width: int
) -> list[Nodes]:
    """Feed `slices`, then drafts a tree of `wanted` nodes for each of `ready`, the first of them.

    At most `width` nodes of a level get children, `width` each; page tables must cover
    `max_fed_nodes` more than the slices. Trees do not depend on those beside them.
    """
    device, page_size = forward.device, forward.page_size
    with torch.inference_mode():
        logits = forward.forward(pack(slices, page_size, device))
        if not ready:
            logits[-1:, :1].tolist()  # waits for the device: its time belongs to this round
            return []
        width = min(width, max(row.wanted for row in ready))
        trees = [_Tree(row, trunk, width) for row, trunk in zip(ready, slices, strict=False)]
        growing, depth = trees, 0
        while True:
            _add_children(growing, logits, depth, width)
            first, sources = 0, []
            for tree in growing:
                sources.extend([first + place for place in tree.places])
                first += tree.num_parents
            growing = [tree for tree in growing if tree.places]
            if not growing:
                return [tree.best() for tree in trees]
            batch = pack([tree.feed() for tree in growing], page_size, device)
            logits, depth = forward.forward(batch, torch.tensor(sources, device=device)), depth + 1


def _add_children(trees: Sequence[_Tree], logits: Tensor, depth: int, width: int) -> None:
    """`logits` [nodes, vocab] are those of the trees' latest levels, one after the other."""
    sizes = [tree.num_fed for tree in trees]
    most, first = max(sizes), 0
    if min(sizes) < most:  # repeats a tree's last node: noise is made once per tree
        padded: list[int] = []
        for size in sizes:
            padded.extend([first + min(i, size - 1) for i in range(most)])
            first += size
        logits = logits.index_select(0, torch.tensor(padded, device=logits.device))
    rows = [tree.row for tree in trees]
    draws = TargetDraws.of([r.sampling for r in rows], [r.length for r in rows], logits.device)
    places = logits[: len(trees) * most].view(len(trees), most, -1)
    ids, log_probs = draws.likeliest(places, depth, width)
    for tree, size, tokens, gains in zip(
        trees, sizes, ids.cpu().numpy(), log_probs.cpu().numpy(), strict=True
    ):
        tree.add(tokens[:size], gains[:size])


class _Tree:
    """One row's nodes. They are numbered in the order in which they were looked at."""

    def __init__(self, row: ReadyRow, trunk: RowSlice, width: int) -> None:
        self.row = row
        self.num_parents = 0  # of the latest level's nodes
        self.places: list[int] = []  # of the parents of those to be fed, among these
        self._trunk = trunk
        self._width = min(width, row.wanted)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._level = [-1]  # nodes whose children come next
        self._slots: list[int] = []  # nodes that were fed, in order
        self._slot_parents: list[int] = []

    @property
    def num_fed(self) -> int:
        """Nodes of the latest level that was fed; the root at first."""
        return len(self._level)

    def add(self, tokens: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Children of the latest level's nodes, [nodes, width]: chooses those to be fed next."""
        above = [self._scores[node] if node >= 0 else 0.0 for node in self._level]
        scores = np.asarray(above, np.float32)[:, None] + log_probs
        first, width = len(self._tokens), scores.shape[1]
        self._tokens.extend(tokens.flatten().tolist())
        self._scores.extend(scores.flatten().tolist())
        self._parents.extend([node for node in self._level for _ in range(width)])
        wanted = self.row.wanted
        kth = sorted(self._scores)[-wanted] if wanted <= len(self._scores) else -math.inf
        room = min(self._width, MAX_TREE_NODES - len(self._slots))
        best = np.argsort(-scores, axis=None, kind="stable")[:room].tolist()
        best = [i for i in best if scores.flat[i] > kth] if wanted > 1 else []
        self.num_parents = len(self._level)
        self.places = [i // width for i in best]
        self._level = [first + i for i in best]

    def feed(self) -> RowSlice:
        """The chosen nodes, behind those that were fed before."""
        start = self._trunk.start + len(self._trunk.token_ids) + len(self._slots)
        slot_of = {node: slot for slot, node in enumerate(self._slots)} | {-1: -1}
        self._slot_parents.extend([slot_of[self._parents[node]] for node in self._level])
        self._slots.extend(self._level)
        tokens = [self._tokens[node] for node in self._level]
        return RowSlice(
            tokens, start, self._trunk.block_table, len(tokens), tuple(self._slot_parents)
        )

    def best(self) -> Nodes:
        """The draft."""
        return best_nodes(
            np.array(self._tokens),
            np.array(self._parents),
            np.array(self._scores, np.float32),
            self.row.wanted,
        )
