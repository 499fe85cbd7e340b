"""A recurrent module's loops: true rows with the target's states, K draws, K - 1 forwards.

Rows that no captured loop holds (masked rows, very long drafts) are drafted for eagerly. A captured
loop of trees feeds `tree_width` nodes at every level, also those that cannot lead into the draft.
The K best of all are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.drafting.drafters import AsyncLoop, Chain, DraftInput, features_of
from outrider.drafting.graphs.chains import draft_chains, run_loop, sample_chains
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.graphs.loops import CapturedLoops, Draft, LoopCapture, chains_of, read_chains
from outrider.drafting.hidden_states.forward import LEAD, FeatureRows, HeadForward
from outrider.drafting.hidden_states.grow_trees import (
    draft_trees,
    grow_trees,
    max_fed_nodes,
    read_trees,
)
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.trees import Guess, Nodes, TargetDraws
from outrider.drafting.proposer import ProposerLimits
from outrider.drafting.session_pages import longest_session
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.graphs.staging import PageLayout
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.sampling.coupled import SamplingBatch


class RecurrentDrafter:
    """Drafts with `head` over `pools`, which are its own. Raises `ConfigError` for too small ones.

    All methods take rows with features, most tokens wanted first. With `capture` loops are captured
    now, of the limits' tree width. They take the pools' last page as their scratch page. Used from
    one thread.
    """

    def __init__(
        self,
        head: RecurrentHead,
        pools: KVPools,
        backend: AttentionBackend,
        limits: ProposerLimits,
        capture: LoopCapture | None = None,
    ) -> None:
        self.head = head
        self.limits = limits
        self.page_size = pools.page_size
        self.captured = capture is not None
        self.num_pages = pools.num_pages - self.captured
        self.max_draft_tokens = limits.max_draft_tokens
        longest = min(head.max_model_len, limits.max_model_len or head.max_model_len)
        num_fed = self.num_fed(*[limits.max_draft_tokens] * 2, chain=False)
        self.max_model_len = longest_session(longest, pools, num_fed, self.captured)
        self._backend = backend
        head.bind(pools)
        if capture is not None:
            layout = PageLayout(self.max_model_len, self.page_size, self.num_pages, head.device)
            self._sampler = capture.sampler
            self._inputs = LoopInputs(capture.shapes, layout, LEAD)
            most = max(shape.rows * shape.query_len for shape in capture.shapes)
            self._features = FeatureRows(most, head.features.width, head.device)
            self._loops = CapturedLoops(capture, self._inputs, self._loop, _output_shape)

    def num_fed(self, num_tokens: int, most: int, *, chain: bool) -> int:
        """Return the most slots past the true rows that a draft of `num_tokens` takes.

        The largest draft of its round has `most`.
        """
        if chain:
            return num_tokens - 1
        return max_fed_nodes(most, self.limits.tree_width, captured=self.captured)

    def sure_chains(self, rows: Sequence[DraftInput]) -> list[Chain]:
        """Draft as `draft_chains`."""
        return self._drafts(rows, read_chains, self._eager_chains)

    def trees(self, rows: Sequence[DraftInput]) -> list[Nodes]:
        """Draft as `draft_trees`."""
        return self._drafts(rows, read_trees, self._eager_trees)

    def sampled_chains(
        self, rows: Sequence[DraftInput]
    ) -> list[tuple[list[int], list[DraftProbs | None]]]:
        """Draft as `sample_chains`."""
        return sample_chains(self._forward(rows), rows, LEAD)

    def launch_after_verify(
        self, rows: Sequence[DraftInput], verify_output: Tensor
    ) -> AsyncLoop[Guess] | None:
        """Implement `AsyncDrafter`, by captured loops only."""
        if not self.captured:
            return None
        wide = self.limits.tree_width > 1
        return self._loops.launch_after_verify(
            rows,
            verify_output,
            _read_grown if wide else _read_lines,
            None if wide else chains_of,
            lambda some: self._features.take(features_of(some)),
        )

    def _drafts(
        self,
        rows: Sequence[DraftInput],
        read: Callable[[NDArray[np.int32], Sequence[int]], list[Draft]],
        eager: Callable[[Sequence[DraftInput]], list[Draft]],
    ) -> list[Draft]:
        if not self.captured:
            return eager(rows)
        return self._loops.drafts(
            rows, read, eager, lambda some: self._features.fill(features_of(some))
        )

    def _eager_chains(self, rows: Sequence[DraftInput]) -> list[Chain]:
        return draft_chains(self._forward(rows), rows, LEAD)

    def _eager_trees(self, rows: Sequence[DraftInput]) -> list[Nodes]:
        return draft_trees(self._forward(rows), rows, self.limits.tree_width)

    def _forward(self, rows: Sequence[DraftInput]) -> HeadForward:
        with torch.inference_mode():
            states = torch.cat(features_of(rows)).to(self.head.device, non_blocking=True)
            return HeadForward(self.head, self._backend, self.page_size, states)

    def _loop(self, shape: LoopShape) -> Tensor:
        """Run the loop: int32 [rows, tokens, 1] of chains, as `grow_trees` of trees."""
        rows = self._inputs.rows(shape)
        batches = self._inputs.batches(shape, rows)
        states = self._features.spread(rows)
        forward = HeadForward(self.head, self._backend, self.page_size, states)
        if shape.width > 1:
            draws = TargetDraws(rows.sampling, self._sampler.noised)
            return grow_trees(forward, batches, draws, shape.width, shape.num_tokens)

        def draw(logits: Tensor, batch: SamplingBatch | None) -> tuple[Tensor, ...]:
            assert batch is not None
            return (self._sampler.choose(logits, batch),)

        drawn = run_loop(forward.forward, batches, shape.num_tokens, draw)
        return torch.stack([tokens for (tokens,) in drawn], dim=1).to(torch.int32)[:, :, None]


def _read_lines(drafted: NDArray[np.int32], wanted: Sequence[int]) -> list[Guess]:
    chains = read_chains(drafted, wanted)
    return [((tokens, list(range(-1, len(tokens) - 1))), told) for tokens, told in chains]


def _read_grown(drafted: NDArray[np.int32], wanted: Sequence[int]) -> list[Guess]:
    return [(nodes, b"") for nodes in read_trees(drafted, wanted)]


def _output_shape(shape: LoopShape) -> tuple[int, ...]:
    return shape.rows, shape.num_tokens, 1 if shape.width == 1 else 3
