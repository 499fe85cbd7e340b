"""Draft tokens that a step reads on the device, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.transfers import index_on


class PlacedDrafts(NamedTuple):
    """Device drafts of a step's rows. On other ranks: memory that those of rank 0 are sent to."""

    tokens: Tensor  # int32 [sum of the rows' rooms], -1 for each that a row lacks
    lengths: Sequence[int] | None = None  # draft tokens of each row; None: only the device knows

    @classmethod
    def gather(
        cls,
        drafts: Tensor,
        sources: Sequence[int],
        lengths: Sequence[int],
        rooms: Sequence[int],
    ) -> PlacedDrafts:
        """Have the device take each row's draft from a row of `drafts`, int32 [any, most].

        `sources` are these rows, -1 for a row without a draft. `lengths` are no more than `rooms`.
        """
        width = drafts.shape[1]
        steps = np.arange(max(rooms))
        places = np.asarray(sources)[:, None] * width + steps
        places[steps >= np.asarray(lengths)[:, None]] = -1
        flat = places[steps < np.asarray(rooms)[:, None]]
        index = index_on(drafts.device, flat.tolist())
        found = drafts.flatten().index_select(0, index.clamp(min=0))
        return cls(torch.where(index >= 0, found, -1), lengths)
