"""What the tokens of a draft tree see of one another: themselves and their ancestors.

A row that carries a tree keeps its nodes in consecutive slots, in their order, so that siblings do
not overwrite each other's keys; their positions follow their depth. Tree attention is due to
SpecInfer (Miao et al., arXiv 2305.09781) and Medusa (Cai et al., arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MAX_TREE_NODES: Final = 64
"""A node's ancestors are bits of one int64."""


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Which keys the tokens of a batch see where some rows hold a tree; on the model's device.

    Of a row's slots, counted from its first, those before `starts[row]` are seen as ever: up to
    the token's own position. Slot starts[row] + i is seen by token t if bit i of visible[t] is set.
    """

    starts: Tensor  # int32 [num_rows]; where a row holds no tree, all its slots come before
    visible: Tensor  # int64 [num_tokens]; 0 for tokens that are no nodes

    def seen(self, keys: Tensor, starts: Tensor, visible: Tensor, window: int | None) -> Tensor:
        """Whether keys [L], slots of a row, are nodes that tokens see: bool [B, Q, L].

        starts int32 [B], visible int64 [B, Q]. `window`: levels that a token sees at most, its own
        included.
        """
        node = keys - starts[:, None, None]
        bits = visible[:, :, None] >> node.clamp(0, MAX_TREE_NODES - 1)
        seen = (bits & 1).bool() & (node >= 0) & (node < MAX_TREE_NODES)
        if window is not None:
            # A node comes after its ancestors: what it sees from a slot on are the nearest levels.
            seen &= seen.flip(-1).cumsum(dim=-1).flip(-1) <= window
        return seen


def depths(parents: Sequence[int]) -> list[int]:
    """Per node how many nodes are above it; a child of the root (-1) has none."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def lineages(parents: Sequence[int]) -> NDArray[np.int64]:
    """Per node the bits of itself and of its ancestors. There are at most `MAX_TREE_NODES`."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append((found[parent] if parent >= 0 else 0) | 1 << node)
    return np.array(found, np.uint64).view(np.int64)
