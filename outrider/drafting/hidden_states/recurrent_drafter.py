"""A recurrent module's drafts: true rows with the target's states, K draws, K - 1 forwards.

A captured loop of trees feeds `tree_width` nodes at every level, also those that cannot lead into
the draft. The K best of all are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceNodes
from outrider.draft_tree import DraftProbs, chain_parents
from outrider.drafting.drafters import DraftInput, features_on
from outrider.drafting.graphs.chains import chain_loop, draft_chains, feed, sample_chains
from outrider.drafting.graphs.loop_inputs import LoopShape
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.forward import LEAD, HeadForward
from outrider.drafting.hidden_states.grow_trees import (
    draft_trees,
    grow_trees,
    max_fed_nodes,
    read_trees,
)
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.trees import Guess, TargetDraws, nodes_on_device


class RecurrentDrafter(CachedDrafter):
    """Drafts with a `RecurrentHead`."""

    head: RecurrentHead

    def num_fed(self, num_tokens: int, most: int, *, chain: bool) -> int:
        if chain:
            return num_tokens - 1
        return max_fed_nodes(most, self.limits.tree_width, captured=self.captured)

    def sampled_chains(
        self, rows: Sequence[DraftInput]
    ) -> list[tuple[list[int], list[DraftProbs | None]]]:
        return sample_chains(self._forward(rows), rows, LEAD)

    def _eager(self, rows: Sequence[DraftInput]) -> list[Guess]:
        forward, width = self._forward(rows), self.limits.tree_width
        if not rows[0].wanted:  # without a wait: the engine's step may be in flight
            with torch.inference_mode():
                feed(forward, rows)
            return []
        if width > 1 and rows[0].mask is None:
            return draft_trees(forward, rows, width)
        chains = draft_chains(forward, rows, LEAD, with_confidences=True)
        return [Guess.chain(*chain) for chain in chains]

    def _forward(self, rows: Sequence[DraftInput]) -> HeadForward:
        with torch.inference_mode():
            states = features_on(self.head.device, rows)
            return HeadForward(self.head, self._backend, self.page_size, states)

    def _loop(self, shape: LoopShape) -> Tensor:
        """Run the loop: as `chain_loop`, or of trees as `grow_trees`."""
        rows = self._inputs.rows(shape)
        batches = self._inputs.batches(shape, rows)
        assert rows.features is not None
        forward = HeadForward(self.head, self._backend, self.page_size, rows.features)
        if shape.width > 1:
            draws = TargetDraws(rows.sampling, self._sampler)
            return grow_trees(forward, batches, draws, shape.width, shape.num_tokens)
        return chain_loop(forward.forward, batches, shape.num_tokens, self._sampler.choose)

    def _nodes(self, output: Tensor, count: int) -> DeviceNodes:
        if self.limits.tree_width > 1:
            return nodes_on_device(output, count)
        return DeviceNodes(output[:, :count])

    def _read(self, output: NDArray[np.int32], wanted: Sequence[int]) -> list[Guess]:
        if self.limits.tree_width > 1:
            return read_trees(output, wanted)
        chains = zip(output.tolist(), wanted, strict=True)
        return [Guess(tokens[:n], chain_parents(n)) for tokens, n in chains]
