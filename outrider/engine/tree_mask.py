"""The attention mask of draft trees: a token sees itself and its ancestors.

A row keeps the nodes of its tree in consecutive slots, so that siblings do not overwrite each
other's keys. Positions follow the depth. Tree attention is due to SpecInfer (Miao et al., arXiv
2305.09781) and Medusa (Cai et al., arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MAX_TREE_NODES: Final = 64
"""A node's ancestors are the bits of one int64."""


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The keys that the tokens of a batch see where some rows hold a tree, on the device.

    Slots of a row are counted from its first. Token t sees the slots before `starts[row]` up to its
    own position. It sees slot starts[row] + i if bit i of visible[t] is set.
    """

    starts: Tensor  # int32 [num_rows]; the row's length where it holds no tree
    visible: Tensor  # int64 [num_tokens]; 0 for tokens outside a tree

    def seen(self, keys: Tensor, starts: Tensor, visible: Tensor, window: int | None) -> Tensor:
        """Return which of the slots `keys` [L] are nodes that tokens see: bool [B, Q, L].

        starts int32 [B], visible int64 [B, Q]. A token sees at most `window` levels, its own
        included.
        """
        node = keys - starts[:, None, None]
        bits = visible[:, :, None] >> node.clamp(0, MAX_TREE_NODES - 1)
        seen = (bits & 1).bool() & (node >= 0) & (node < MAX_TREE_NODES)
        if window is not None:
            # Ancestors come before a node, so the last visible slots are the nearest levels.
            seen &= seen.flip(-1).cumsum(dim=-1).flip(-1) <= window
        return seen


def lineages(parents: Sequence[int]) -> NDArray[np.int64]:
    """Return per node the bits of itself and its ancestors, for `MAX_TREE_NODES` at most."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append((found[parent] if parent >= 0 else 0) | 1 << node)
    return np.array(found, np.uint64).view(np.int64)
