"""The trees of a recorded step, where its inputs are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.batch import RowSlice
from outrider.engine.tree_mask import depths, lineages


@dataclass(frozen=True, slots=True, eq=False)
class TreeViews:
    """Where a bucket's trees are in the host's buffer."""

    starts: NDArray[Any]  # int32 [rows], as `TreeMask.starts`
    visible: NDArray[Any]  # int64 [rows, query_len], as `TreeMask.visible`
    parents: NDArray[Any]  # int64 [rows, query_len]: of nodes 0, 1, ...; the last is none's

    def plant(
        self, rows: Sequence[RowSlice], seq_lens: NDArray[Any], positions: NDArray[Any]
    ) -> None:
        """Write the rows' trees, chains as trees of which nothing is hidden.

        `seq_lens` [rows] and `positions` [rows, query_len] are the bucket's: the nodes' positions
        are put right.
        """
        self.starts[:] = seq_lens
        self.visible.fill(0)
        self.parents[:] = np.arange(-1, self.parents.shape[1] - 1)
        for i, row in enumerate(rows):
            if row.parents:
                first, nodes = row.start + 1, slice(1, 1 + len(row.parents))
                self.starts[i] = first
                self.visible[i, nodes] = lineages(row.parents)
                self.parents[i, : len(row.parents)] = row.parents
                positions[i, nodes] = np.array(depths(row.parents)) + first
