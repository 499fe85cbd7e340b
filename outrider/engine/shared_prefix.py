"""Find adjacent rows of a batch that begin with the same pages.

Branches of one session differ only in their last pages. Attention reads the pages that they share
once for all of them (as in Hydragen, Juravsky et al., arXiv 2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_OWN_PAGES: Final = 4
"""Rows with more pages of their own do not join a run."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Runs of rows; each row begins with most of the pages of the row before it."""

    places: Tensor  # int32 [rows]: the row's index in its run
    pages: Tensor  # int32 [rows]: shared with the row before; 0 for the first of a run

    @classmethod
    def of(cls, block_table: Tensor, seq_lens: Tensor, page_size: int) -> SharedPrefix:
        """Compare int32 tables [rows, max_pages] with lengths [rows], without a device sync.

        Rows whose whole tables are equal, such as padding rows, share nothing.
        """
        differs = block_table[1:] != block_table[:-1]
        common = F.pad(differs.int().argmax(1), (1, 0))
        pages = (seq_lens + (page_size - 1)) // page_size
        most = torch.maximum(pages, pages.roll(1))  # the first row begins a run in any case
        joins = (common > 0) & (most - common <= MAX_OWN_PAGES)
        row = torch.arange(len(seq_lens), device=seq_lens.device)
        first = torch.where(joins, 0, row).cummax(0).values
        return cls((row - first).to(torch.int32), torch.where(joins, common, 0).to(torch.int32))
