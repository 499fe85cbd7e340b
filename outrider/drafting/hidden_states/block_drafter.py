"""A round of a module that guesses a block at once: true rows and slots in one forward.

On a GPU it is one captured loop. What no loop holds (masked rows, those under rejection, prompts)
runs eagerly. A loop has one number of slots, so its rows get guesses of as many, of which they take
what they want.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.drafting.drafters import AsyncLoop, DraftInput, features_of
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.graphs.loops import CapturedLoops, LoopCapture
from outrider.drafting.hidden_states.forward import LEAD, FeatureRows
from outrider.drafting.hidden_states.guesses import guess_chains
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.trees import Guess, Nodes, TargetDraws, max_trees
from outrider.drafting.proposer import ProposerLimits
from outrider.drafting.session_pages import longest_session
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.graphs.staging import PageLayout
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.sampling.coupled import Lane

Chain = tuple[list[int], bytes]


class BlockDrafter:
    """Drafts with `head` over `pools`, which are its own. Raises `ConfigError` for too small ones.

    All methods take rows with features, most tokens wanted first, and feed all of them. Drafts do
    not depend on those beside them. Used from one thread.
    """

    def __init__(
        self,
        head: BlockHead,
        pools: KVPools,
        backend: AttentionBackend,
        limits: ProposerLimits,
        capture: LoopCapture | None = None,
    ) -> None:
        """With `capture` loops of `block_shapes` are captured now; they take the last page."""
        self.head = head
        self.limits = limits
        self.page_size = pools.page_size
        self.num_pages = pools.num_pages - (capture is not None)
        # A chain ends with the block; a tree may have more nodes.
        self.max_draft_tokens = limits.max_draft_tokens
        if limits.tree_width == 1:
            self.max_draft_tokens = min(limits.max_draft_tokens, head.max_depth)
        num_fed = head.num_fed(min(limits.max_draft_tokens, head.max_depth))
        longest = min(head.max_model_len, limits.max_model_len or head.max_model_len)
        self.max_model_len = longest_session(longest, pools, num_fed, capture is not None)
        self._backend = backend
        self._at_once = max_trees(max(limits.tree_width, head.max_depth), head.vocab_size)
        head.bind(pools)
        self._loops: CapturedLoops | None = None
        self._depths = [head.max_depth]
        if capture is not None:
            layout = PageLayout(self.max_model_len, self.page_size, self.num_pages, head.device)
            self._sampler = capture.sampler
            self._inputs = LoopInputs(capture.shapes, layout, LEAD)
            most = max(shape.rows * shape.query_len for shape in capture.shapes)
            self._features = FeatureRows(most, head.features.width, head.device)
            self._depths = sorted({self._depth(shape.num_tokens) for shape in capture.shapes})
            self._loops = CapturedLoops(capture, self._inputs, self._loop, self._output_shape)

    def num_fed(self, num_tokens: int, most: int, *, chain: bool) -> int:  # noqa: ARG002
        """Return the slots past the true rows in a round whose largest draft has `most` tokens."""
        depth = self._depth(most)
        if self._loops is not None:  # which may have more
            depth = next((each for each in self._depths if each >= depth), depth)
        return max(self.head.num_slots(depth), self.head.num_fed(depth))

    @torch.inference_mode()
    def trees(self, rows: Sequence[DraftInput]) -> list[Nodes]:
        """Feed rows and return a tree for each that wants one."""
        if self._loops is None:
            return self._eager_trees(rows)
        return self._loops.drafts(rows, self.head.trees, self._eager_trees, self._load)

    @torch.inference_mode()
    def sure_chains(self, rows: Sequence[DraftInput]) -> list[Chain]:
        """Feed rows and return a chain for each that wants one, with its tokens' confidences.

        Of masked rows, which are drawn token by token, nothing is told.
        """
        if self._loops is None or self.limits.tree_width > 1:
            return self._eager_chains(rows)
        return self._loops.drafts(rows, self._read_chains, self._eager_chains, self._load)

    def launch_after_verify(
        self, rows: Sequence[DraftInput], verify_output: Tensor
    ) -> AsyncLoop[Guess] | None:
        """Implement `AsyncDrafter`, by captured loops only."""
        if self._loops is None:
            return None
        wide = self.limits.tree_width > 1
        return self._loops.launch_after_verify(
            rows,
            verify_output,
            self._read_trees if wide else self._read_sure,
            None if wide else self.head.chains,
            lambda some: self._features.take(features_of(some)),
        )

    def _eager_trees(self, rows: Sequence[DraftInput]) -> list[Nodes]:
        guesses = self._guesses(rows, self._run(rows), self.limits.tree_width)
        return [tree for part, sizes in guesses for tree in self.head.trees(part, sizes)]

    def _eager_chains(self, rows: Sequence[DraftInput]) -> list[Chain]:
        outputs = self._run(rows)
        ready = [row for row in rows if row.wanted]
        masked = [i for i, row in enumerate(ready) if row.mask is not None]
        if not masked:
            return self._free_chains(ready, outputs)
        assert outputs is not None
        free = [i for i, row in enumerate(ready) if row.mask is None]
        drawn = self._drawn([ready[i] for i in masked], outputs[masked], Lane.SHARED)
        chains = dict(zip(masked, ((tokens, b"") for tokens, _ in drawn), strict=True))
        chains.update(
            zip(free, self._free_chains([ready[i] for i in free], outputs[free]), strict=True)
        )
        return [chains[i] for i in range(len(ready))]

    def _free_chains(self, rows: Sequence[DraftInput], outputs: Tensor | None) -> list[Chain]:
        """Return the chains of rows that no mask restricts."""
        guesses = self._guesses(rows, outputs, 1)
        return [chain for part, sizes in guesses for chain in self._read_chains(part, sizes)]

    @torch.inference_mode()
    def sampled_chains(
        self, rows: Sequence[DraftInput]
    ) -> list[tuple[list[int], list[DraftProbs | None]]]:
        """Draft as `guess_chains` for rejection. All rows want drafts, and none is greedy."""
        outputs = self._run(rows)
        assert outputs is not None
        return list(self._drawn(rows, outputs, Lane.DRAFT))

    def _run(self, rows: Sequence[DraftInput]) -> Tensor | None:
        outputs = self.head.run(rows, self._backend, self.page_size)
        if outputs is None and self.head.device.type == "cuda":
            torch.cuda.synchronize(self.head.device)  # the forward's time belongs to this round
        return outputs

    def _guesses(
        self, rows: Sequence[DraftInput], outputs: Tensor | None, width: int
    ) -> Iterator[tuple[NDArray[np.int32], list[int]]]:
        """Yield the head's guesses for those rows that want drafts, in parts, and their sizes."""
        ready = [row for row in rows if row.wanted]
        for start in range(0, len(ready), self._at_once):
            assert outputs is not None
            part = ready[start : start + self._at_once]
            states, sizes = outputs[start : start + len(part)], [row.wanted for row in part]
            lengths = [row.end + LEAD - 1 for row in part]
            draws = TargetDraws.of([row.sampling for row in part], lengths, self.head.device)
            depth, widest = self._depth(max(sizes)), min(width, max(sizes))
            guesses = self.head.guess(states, self._anchors(part), draws, depth, widest)
            yield guesses.cpu().numpy(), sizes

    def _read_chains(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Chain]:
        """Return each row's first tokens of guesses of width 1, with their confidences."""
        return [(nodes[0], told) for nodes, told in self._read_sure(guesses, sizes)]

    def _read_sure(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
        chains = self.head.chains(torch.from_numpy(guesses)).tolist()
        sure = self.head.confidences(guesses)
        return [
            ((tokens[:size], list(range(-1, min(size, len(tokens)) - 1))), told[:size])
            for tokens, told, size in zip(chains, sure, sizes, strict=True)
        ]

    def _read_trees(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
        return [(nodes, b"") for nodes in self.head.trees(guesses, sizes)]

    def _depth(self, num_tokens: int) -> int:
        return min(num_tokens, self.head.max_depth)

    def _load(self, rows: Sequence[DraftInput]) -> None:
        self._features.fill(features_of(rows))

    def _loop(self, shape: LoopShape) -> Tensor:
        """Run a loop and return what the head's trees are chosen from: int32 [rows, ...]."""
        rows = self._inputs.rows(shape)
        batches = self._inputs.batches(shape, rows)
        tokens = rows.tokens.gather(1, rows.last[:, None])[:, 0]
        states = self._features.spread(rows)
        outputs = self.head.outputs(states, tokens, batches, self._backend)
        draws = TargetDraws(rows.sampling, self._sampler.noised)
        return self.head.guess(outputs, tokens, draws, outputs.shape[1], shape.width)

    def _output_shape(self, shape: LoopShape) -> tuple[int, ...]:
        self._inputs.fill(shape, (), ())
        with torch.inference_mode():
            return tuple(self._loop(shape).shape)

    def _drawn(
        self, rows: Sequence[DraftInput], outputs: Tensor, lane: Lane
    ) -> Iterator[tuple[list[int], list[DraftProbs | None]]]:
        for start in range(0, len(rows), self._at_once):
            part = rows[start : start + self._at_once]
            states = outputs[start : start + len(part)]
            yield from guess_chains(self.head, states, self._anchors(part), part, lane)

    def _anchors(self, rows: Sequence[DraftInput]) -> Tensor:
        """Return the last committed token of each row: int64 [n] on the device."""
        tokens = torch.tensor([row.slice.token_ids[-1] for row in rows])
        return tokens.to(self.head.device, non_blocking=True)
