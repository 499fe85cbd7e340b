"""A draft module's drafts for the rows of a round, launched operation by operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.drafting.draft_model.chains import ReadyRow, draft_chains, sample_chains
from outrider.drafting.hidden_states.forward import LEAD, HeadForward
from outrider.drafting.hidden_states.grow_trees import draft_trees
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.trees import Nodes
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.batch import RowSlice


class HeadDrafter:
    """Drafts with `head`, which is bound to its pools.

    All methods feed `slices` with their `features`, the states of each slice's tokens, bfloat16
    [tokens, width] on the host, and then draft for each of `ready`, which are the first of them.
    """

    def __init__(self, head: RecurrentHead, backend: AttentionBackend, page_size: int) -> None:
        self._head = head
        self._backend = backend
        self._page_size = page_size

    def chains(
        self, slices: Sequence[RowSlice], features: Sequence[Tensor], ready: Sequence[ReadyRow]
    ) -> list[list[int]]:
        """As `draft_chains`."""
        return draft_chains(self._forward(features), slices, ready, LEAD)

    def sampled_chains(
        self, slices: Sequence[RowSlice], features: Sequence[Tensor], ready: Sequence[ReadyRow]
    ) -> list[tuple[list[int], list[DraftProbs | None]]]:
        """As `sample_chains`."""
        return sample_chains(self._forward(features), slices, ready, LEAD)

    def trees(
        self,
        slices: Sequence[RowSlice],
        features: Sequence[Tensor],
        ready: Sequence[ReadyRow],
        width: int,
    ) -> list[Nodes]:
        """As `draft_trees`."""
        return draft_trees(self._forward(features), slices, ready, width)

    def _forward(self, features: Sequence[Tensor]) -> HeadForward:
        with torch.inference_mode():
            states = torch.cat(list(features)).to(self._head.device, non_blocking=True)
            return HeadForward(self._head, self._backend, self._page_size, states)
