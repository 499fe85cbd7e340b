"""A round of a module that guesses a block at once: true rows and slots in one forward.

A captured loop has one number of slots, so its rows get guesses of as many, of which they take what
they want.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceNodes
from outrider.draft_tree import DraftProbs
from outrider.drafting.drafters import DraftInput
from outrider.drafting.graphs.loop_inputs import LoopShape
from outrider.drafting.graphs.loops import LoopCapture
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.earlier_text import EarlierText
from outrider.drafting.hidden_states.forward import LEAD
from outrider.drafting.hidden_states.guesses import guess_chains
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.trees import Guess, TargetDraws, nodes_on_device
from outrider.drafting.proposer import ProposerLimits
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.sampling.noise import Lane

if TYPE_CHECKING:
    from outrider.drafting.hidden_states.recorded_blocks import RecordedBlocks


class BlockDrafter(CachedDrafter):
    """Drafts with a `BlockHead`. Drafts do not depend on those beside them."""

    head: BlockHead

    def __init__(
        self,
        head: BlockHead,
        pools: KVPools,
        backend: AttentionBackend,
        limits: ProposerLimits,
        capture: LoopCapture | None = None,
    ) -> None:
        self._loop_depths = sorted(
            {min(shape.num_tokens, head.max_depth) for shape in (capture.shapes if capture else ())}
        )
        self._at_once = head.max_rows(limits.max_draft_tokens, limits.tree_width)
        super().__init__(head, pools, backend, limits, capture)
        if limits.tree_width == 1:  # a chain ends with the block; a tree may have more nodes
            self.max_draft_tokens = min(limits.max_draft_tokens, head.max_depth)
        self._recorded: RecordedBlocks | None = None
        if head.device.type == "cpu":
            # Imported here: on a GPU nothing needs Numba.
            from outrider.drafting.hidden_states.recorded_blocks import RecordedBlocks

            self._recorded = RecordedBlocks.of(head, backend, self.page_size)

    def num_fed(self, num_tokens: int, most: int, *, chain: bool) -> int:  # noqa: ARG002
        depth = self._depth(most)
        # A loop may have more.
        depth = next((each for each in self._loop_depths if each >= depth), depth)
        return max(self.head.num_slots(depth), self.head.num_fed(depth))

    @torch.inference_mode()
    def sampled_chains(
        self, rows: Sequence[DraftInput]
    ) -> list[tuple[list[int], list[DraftProbs | None]]]:
        outputs = self._run(rows)
        assert outputs is not None
        return list(self._drawn(rows, outputs, Lane.DRAFT))

    @property
    def follows_text(self) -> bool:
        # Captured loops have no text, and eager drafts beside them are to be the same.
        follows = self.limits.tree_width > 1 and self.head.follows_paths
        return follows and self.head.device.type == "cpu" and not self.captured

    @torch.inference_mode()
    def _eager(self, rows: Sequence[DraftInput]) -> list[Guess]:
        outputs = self._run(rows)
        ready = [row for row in rows if row.wanted]
        if outputs is None:
            return []
        # Masked rows are drawn token by token, so they have no confidences.
        masked = [i for i, row in enumerate(ready) if row.mask is not None]
        if not masked:
            return list(self._guesses(ready, outputs))
        free = [i for i, row in enumerate(ready) if row.mask is None]
        drawn = self._drawn([ready[i] for i in masked], outputs[masked], Lane.SHARED)
        drafts = dict(zip(masked, (Guess.chain(tokens) for tokens, _ in drawn), strict=True))
        guesses = self._guesses([ready[i] for i in free], outputs[free])
        drafts.update(zip(free, guesses, strict=True))
        return [drafts[i] for i in range(len(ready))]

    def _run(self, rows: Sequence[DraftInput]) -> Tensor | None:
        if self._recorded is not None and (outputs := self._recorded.run(rows)) is not None:
            return outputs
        return self.head.run(rows, self._backend, self.page_size)

    def _guesses(self, rows: Sequence[DraftInput], outputs: Tensor) -> Iterator[Guess]:
        """Yield the drafts of rows that no mask restricts."""
        device = self.head.device
        for start in range(0, len(rows), self._at_once):
            part = rows[start : start + self._at_once]
            states, sizes = outputs[start : start + len(part)], [row.wanted for row in part]
            lengths = [row.end + LEAD - 1 for row in part]
            depth, width = self._depth(max(sizes)), min(self.limits.tree_width, max(sizes))
            texts = EarlierText([row.text for row in part], device) if self.follows_text else None
            sampling = [row.sampling for row in part]
            draws = TargetDraws.of(sampling, lengths, device, texts)
            guesses = self.head.guess(states, self._anchors(part), draws, depth, width)
            yield from self._read(guesses.cpu().numpy(), sizes)

    def _read(self, output: NDArray[np.int32], wanted: Sequence[int]) -> list[Guess]:
        if self.limits.tree_width > 1:
            return self.head.trees(output, wanted)
        chains = self.head.chains(torch.from_numpy(output)).tolist()
        rows = zip(chains, self.head.confidences(output), wanted, strict=True)
        return [Guess.chain(tokens[:n], confidences[:n]) for tokens, confidences, n in rows]

    def _nodes(self, output: Tensor, count: int) -> DeviceNodes | None:
        if self.limits.tree_width == 1:
            return DeviceNodes(self.head.chains(output)[:, :count])
        if not self.head.follows_paths:  # the host chooses nodes among products of candidates
            return None
        return nodes_on_device(output, count, self.head.max_depth)

    def _depth(self, num_tokens: int) -> int:
        return min(num_tokens, self.head.max_depth)

    def _loop(self, shape: LoopShape) -> Tensor:
        """Run a loop and return what the head's drafts are chosen from: int32 [rows, ...]."""
        rows = self._inputs.rows(shape)
        batches = self._inputs.batches(shape, rows)
        tokens = rows.tokens.gather(1, rows.last[:, None])[:, 0]
        assert rows.features is not None
        outputs = self.head.outputs(rows.features, tokens, batches, self._backend)
        draws = TargetDraws(rows.sampling, self._sampler)
        guesses = self.head.guess(outputs, tokens, draws, outputs.shape[1], shape.width)
        if shape.width > 1 and self.head.follows_paths:  # the host is left with few nodes
            return self._sampler.best_nodes(guesses, shape.num_tokens)
        return guesses

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
