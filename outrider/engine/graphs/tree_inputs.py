"""The draft trees of a captured step, where the host writes its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.batch import RowSlice
from outrider.engine.tree_mask import depths, lineages


@dataclass(frozen=True, slots=True, eq=False)
class TreeViews:
    """A bucket's tree columns in the host's buffer."""

    starts: NDArray[Any]  # int32 [rows], as `TreeMask.starts`
    visible: NDArray[Any]  # int64 [num_tokens], as `TreeMask.visible`
    parents: NDArray[Any]  # int64 [rows, query_len]: of nodes 0, 1, ...; the last is unused

    def fill(
        self,
        rows: Iterable[tuple[int, RowSlice]],
        cu_seqlens: NDArray[Any],
        seq_lens: NDArray[Any],
        positions: NDArray[Any],
    ) -> None:
        """Write the trees of rows, by place, and all else as chains: nothing of these is hidden.

        `cu_seqlens` [rows + 1], `seq_lens` [rows] and `positions` [num_tokens] are the bucket's.
        The positions of nodes are corrected.
        """
        self.starts[:] = seq_lens
        self.visible.fill(0)
        self.parents[:] = np.arange(-1, self.parents.shape[1] - 1)
        for i, row in rows:
            if row.parents:
                first, at, count = row.start + 1, int(cu_seqlens[i]) + 1, len(row.parents)
                self.starts[i] = first
                self.visible[at : at + count] = lineages(row.parents)
                self.parents[i, :count] = row.parents
                positions[at : at + count] = np.array(depths(row.parents)) + first
