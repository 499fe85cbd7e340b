"""Which rows of a batch read the same pages: those that follow one another and begin equally.

Branches of one session differ in their last pages alone. What they share need be read from memory
once for all of them (as in Hydragen, Juravsky et al., arXiv 2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_OWN_PAGES: Final = 4
"""Rows that read more pages besides those they share are taken one by one."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Runs of rows, each of which begins with most of the pages of the row before it."""

    places: Tensor  # int32 [rows]: how far a row is from its run's first
    pages: Tensor  # int32 [rows]: with so many of the pages of the row before; 0 for a run's first

    @classmethod
    def of(cls, block_table: Tensor, seq_lens: Tensor, page_size: int) -> SharedPrefix:
        """Of a batch's int32 tables [rows, max_pages] and lengths [rows]; waits for no device.

        Rows whose whole tables are equal, as those that fill up a batch, share nothing.
        """
        differs = block_table[1:] != block_table[:-1]
        common = F.pad(differs.int().argmax(1), (1, 0))
        pages = (seq_lens + (page_size - 1)) // page_size
        most = torch.maximum(pages, pages.roll(1))  # the first row begins a run in any case
        joins = (common > 0) & (most - common <= MAX_OWN_PAGES)
        row = torch.arange(len(seq_lens), device=seq_lens.device)
        first = torch.where(joins, 0, row).cummax(0).values
        return cls((row - first).to(torch.int32), torch.where(joins, common, 0).to(torch.int32))
