"""The draft trees of a captured step: the host or the device writes parents, the rest follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.batch import RowSlice
from outrider.engine.sampling.verify import VerifyBatch
from outrider.engine.tree_mask import TreeMask
from outrider.engine.tree_walk import walk


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


def place_nodes(
    parents: Tensor, trees: TreeMask, cu_seqlens: Tensor, positions: Tensor, longest: int
) -> None:
    """Write the tokens' `positions` int64 [num_tokens], none above `longest`, and `trees.visible`.

    `parents` int64 [rows, k] are those of the nodes that follow each row's first token, and
    `cu_seqlens` int32 [rows + 1] where a row's tokens begin. May be captured, and run over any
    numbers.
    """
    rows, count = parents.shape
    places = torch.arange(count + 1, device=parents.device)  # 0: the token before all nodes
    is_node = (places > 0).to(torch.int64)
    bits = (is_node << (places - is_node)).expand(rows, -1)
    levels = is_node.expand(rows, -1)
    above = pad(parents.clamp(max=count - 1) + 1, (1, 0))
    for _ in range((count - 1).bit_length()):  # what is known of so many levels, of twice as many
        bits = bits | bits.gather(1, above)
        levels = levels + levels.gather(1, above)
        above = above.gather(1, above)
    tokens = torch.arange(len(positions), device=parents.device)
    row = torch.searchsorted(cu_seqlens[1:-1], tokens.to(torch.int32), right=True)
    place = row * (count + 1) + (tokens - cu_seqlens[row]).clamp(0, count)
    trees.visible.copy_(bits.flatten()[place])
    found = (levels + trees.starts[:, None] - 1).flatten()[place]
    positions.copy_(found.clamp(max=longest))


def walk_nodes(
    parents: Tensor, batch: VerifyBatch, slots: Tensor, scratch_slot: int, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Walk along the rows' trees by the choices in `out`, as `choose_and_verify` leaves them.

    `out` int32 [rows, 2 + k] gets the number of accepted nodes and the choices along the path.
    Returns the slots that move, as in a `Walk`; `slots` int64 [num_tokens] are the tokens' own. May
    be captured.
    """
    count = parents.shape[1]
    real = torch.arange(count, device=parents.device) < batch.draft_lens[:, None]
    tokens, of_nodes = (
        batch.by_row(values, count + 1)[:, 1:] for values in (batch.input_ids, slots)
    )
    drafts = torch.where(real, tokens, -1)
    of_nodes = torch.where(real, of_nodes, scratch_slot)  # those behind a row are another's
    walked = walk(drafts, parents, out[:, 1:].long(), of_nodes, count)
    out.copy_(walked.tokens)
    return walked.source, walked.target


class TreeWork(NamedTuple):
    """The functions by which a captured step handles trees, or others that do the same."""

    place_nodes: Callable[[Tensor, TreeMask, Tensor, Tensor, int], None] = place_nodes
    walk_nodes: Callable[[Tensor, VerifyBatch, Tensor, int, Tensor], tuple[Tensor, Tensor]] = (
        walk_nodes
    )


BY_TORCH: Final = TreeWork()
