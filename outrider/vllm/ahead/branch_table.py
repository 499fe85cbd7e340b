"""A table of drafts, one for each way in which the running step may end for a row.

The device takes the one that fits, so the next step can be launched before the host knows how the
running one ends. The device copies the table between the two steps. Until then the host may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import torch
from torch import Tensor

from outrider.engine.transfers import index_on

_MOST: Final = 32  # entries of a row
_LINE: Final = 16  # values of 4 bytes in a cache line
_NO_OUTCOME: Final = -1  # equals none: a row emits a token at least


def as_outcomes(counts: Tensor, latest: Tensor) -> Tensor:
    """Return as one number each how many tokens rows emitted, and the last: int64 [rows]."""
    return (counts.long() << 32) + latest


class BranchTable:
    """Drafts by row and outcome, on the host and on the device.

    An entry is an outcome (8 bytes) and its draft tokens, -1 for each that is missing. The outcome
    is written last and in one store. A copy that is made meanwhile may have it with tokens of an
    earlier draft, which are valid ids, or with -1.
    """

    def __init__(self, max_rows: int, num_draft_tokens: int, device: torch.device) -> None:
        pinned = device.type == "cuda"  # then the device copies from it by itself
        shape = max_rows, _MOST, -(-(2 + num_draft_tokens) // _LINE) * _LINE
        self._k = num_draft_tokens
        self._on_host = torch.full(shape, -1, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._drafts = self._on_host.numpy()[..., 2 : 2 + self._k]
        self._outcomes = self._on_host.numpy().view(np.int64)[..., 0]
        self._on_device = torch.empty_like(self._on_host, device=device)
        self._slots: list[dict[int, int]] = []  # by row, of each outcome

    def clear(self, num_rows: int) -> None:
        """Begin a table of so many rows. What is still chosen from the last one is of no use."""
        self._slots = [{} for _ in range(num_rows)]
        self._outcomes[:num_rows] = _NO_OUTCOME

    def write(self, row: int, emitted: int, last: int, draft: Sequence[int]) -> None:
        """Set a row's draft after it emitted so many tokens and `last` as the last of them."""
        slots, outcome = self._slots[row], (emitted << 32) + last
        slot = slots.setdefault(outcome, len(slots))
        if slot == _MOST:
            del slots[outcome]
            return
        entry = self._drafts[row, slot]
        entry[: len(draft)] = draft
        entry[len(draft) :] = -1
        self._outcomes[row, slot] = outcome

    def has_branches(self, row: int) -> bool:
        return bool(self._slots[row])

    def choose(self, ended: Tensor, sources: Sequence[int], rooms: Sequence[int]) -> Tensor:
        """Have the device choose drafts when the running step has ended.

        `ended`, int64 [its rows], are their outcomes. `sources` are for each row of the next step
        its place in `ended`, and `rooms` how many draft tokens it may have. Returns int32 [sum of
        `rooms`], the rows one after the other, -1 for each token that a row lacks.
        """
        num_rows = len(sources)
        in_rows = chain(*[range(row * self._k, row * self._k + n) for row, n in enumerate(rooms)])
        index = index_on(ended.device, [*sources, *in_rows])
        table = self._on_device[:num_rows]
        table.copy_(self._on_host[:num_rows], non_blocking=True)
        fits = table.view(torch.int64)[..., 0] == ended[index[:num_rows]][:, None]
        found, slots = fits.int().max(dim=1)
        drafts = torch.take_along_dim(table, slots[:, None, None], dim=1)[:, 0, 2 : 2 + self._k]
        drafts = torch.where(found.bool()[:, None], drafts, -1)
        return drafts.flatten()[index[num_rows:]]
