"""Drafts that were launched behind a step, in the rows of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class PlacedDrafts(NamedTuple):
    """Drafts that the device has by the time at which a step begins, by its rows."""

    tokens: Tensor  # int32 [any, most]
    sources: Sequence[int]  # row of `tokens` for each row of the step; -1: none
    lengths: Sequence[int]  # draft tokens of each row, no more than it has room for

    @classmethod
    def none(cls, num_rows: int) -> PlacedDrafts:
        """Return no drafts for so many rows."""
        nothing = torch.empty(0, 0, dtype=torch.int32, device="cpu")
        return cls(nothing, [-1] * num_rows, [0] * num_rows)

    def fill(self, rooms: Sequence[int]) -> Tensor:
        """Return the draft tokens of all rows, -1 for each that lacks: int32 [sum of `rooms`]."""
        width = self.tokens.shape[1]
        steps = np.arange(max(rooms))
        places = np.asarray(self.sources)[:, None] * width + steps
        places[steps >= np.asarray(self.lengths)[:, None]] = -1
        flat = places[steps < np.asarray(rooms)[:, None]]
        on_cuda = self.tokens.device.type == "cuda"  # else the running step would be waited for
        index = torch.tensor(flat.tolist(), dtype=torch.int64, pin_memory=on_cuda)
        index = index.to(self.tokens.device, non_blocking=True)
        found = self.tokens.flatten().index_select(0, index.clamp(min=0))
        return torch.where(index >= 0, found, -1)
