"""The draft trees of a captured step: the host or the device writes parents, the rest follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batch import RowSlice
from outrider.engine.tree_mask import TreeMask


@dataclass(frozen=True, slots=True, eq=False)
class TreeViews:
    """A bucket's tree columns in the host's buffer."""

    starts: NDArray[Any]  # int32 [rows], as `TreeMask.starts`
    parents: NDArray[Any]  # int64 [rows, query_len]: of nodes 0, 1, ...; the last is unused

    def fill(self, rows: Iterable[tuple[int, RowSlice]], starts: NDArray[Any]) -> None:
        """Write the trees of rows, by place, and all else as chains.

        `starts` [rows] are the positions of the rows' first tokens.
        """
        np.add(starts, 1, out=self.starts, casting="same_kind")
        self.parents[:] = np.arange(-1, self.parents.shape[1] - 1)
        for i, row in rows:
            if row.parents:
                self.parents[i, : len(row.parents)] = row.parents


def place_nodes(parents: Tensor, trees: TreeMask, cu_seqlens: Tensor) -> Tensor:
    """Write `trees.visible`, and return the tokens' positions: int64 [num_tokens].

    `parents` int64 [rows, k] are those of the nodes that follow each row's first token, and
    `cu_seqlens` int32 [rows + 1] where a row's tokens begin. May be captured.
    """
    rows, count = parents.shape
    places = torch.arange(count + 1, device=parents.device)  # 0: the token before all nodes
    is_node = (places > 0).to(torch.int64)
    bits = (is_node << (places - is_node)).expand(rows, -1)
    levels = is_node.expand(rows, -1)
    above = torch.nn.functional.pad(parents + 1, (1, 0))
    for _ in range((count - 1).bit_length()):  # what is known of so many levels, of twice as many
        bits = bits | bits.gather(1, above)
        levels = levels + levels.gather(1, above)
        above = above.gather(1, above)
    tokens = torch.arange(len(trees.visible), device=parents.device)
    row = torch.searchsorted(cu_seqlens[1:], tokens.to(torch.int32), right=True)
    place = row * (count + 1) + tokens - cu_seqlens[:-1][row]
    trees.visible.copy_(bits.flatten()[place])
    return (levels + trees.starts[:, None] - 1).flatten()[place]
