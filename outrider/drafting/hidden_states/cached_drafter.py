"""Draft with a module over pages of its own, by captured loops or eagerly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceNodes
from outrider.draft_tree import DraftProbs
from outrider.drafting.drafters import AsyncLoop, DraftInput, StatesBehind
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.graphs.loops import CapturedLoops, LoopCapture
from outrider.drafting.hidden_states.forward import LEAD
from outrider.drafting.hidden_states.heads.base import CachedHead
from outrider.drafting.hidden_states.trees import Guess
from outrider.drafting.proposer import ProposerLimits
from outrider.drafting.session_pages import longest_session
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.graphs.staging import PageLayout
from outrider.engine.kv_cache.pools import KVPools


class CachedDrafter:
    """Drafts with `head` over `pools`, which are its own; a subclass has the hooks below.

    All methods take rows with features, most tokens wanted first, and feed all of them. With
    `capture` loops are captured now, of the limits' tree width. They take the pools' last page as
    their scratch page. What no loop holds (masked rows, those under rejection, prompts) runs
    eagerly. Raises `ConfigError` for pools that are too small. Used from one thread.
    """

    def __init__(
        self,
        head: CachedHead,
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
        self.max_draft_tokens = most = limits.max_draft_tokens
        longest = min(head.max_model_len, limits.max_model_len or head.max_model_len)
        num_fed = self.num_fed(most, most, chain=False)
        self.max_model_len = longest_session(longest, pools, num_fed, self.captured)
        self._backend = backend
        head.bind(pools)
        self._loops: CapturedLoops | None = None
        if capture is not None:
            layout = PageLayout(self.max_model_len, self.page_size, self.num_pages, head.device)
            self._sampler = capture.sampler
            self._inputs = LoopInputs(capture.shapes, layout, LEAD, head.features.width)
            self._loops = CapturedLoops(capture, self._inputs, self._loop)

    def drafts(self, rows: Sequence[DraftInput]) -> list[Guess]:
        """Feed rows and make a draft for each that wants one.

        Trees, or chains where the limits' tree width is 1 or the rows are masked. Of a larger width
        all of the rows are masked, or none.
        """
        if self._loops is None:
            return self._eager(rows)
        return self._loops.drafts(rows, self._read, self._eager)

    def launch_after_verify(
        self, rows: Sequence[DraftInput], verify_output: Tensor, states: StatesBehind | None = None
    ) -> AsyncLoop[Guess] | None:
        """Implement `AsyncDrafter`, by captured loops only."""
        if self._loops is None:
            return None
        return self._loops.launch_after_verify(rows, verify_output, states, self._read, self._nodes)

    @property
    def follows_text(self) -> bool:
        """Return whether rows that want trees are to bring their texts' latest tokens."""
        return False

    def num_fed(self, num_tokens: int, most: int, *, chain: bool) -> int:
        """Return the most slots past the true rows that a draft of `num_tokens` takes.

        The largest draft of its round has `most`.
        """
        raise NotImplementedError

    def sampled_chains(
        self, rows: Sequence[DraftInput]
    ) -> list[tuple[list[int], list[DraftProbs | None]]]:
        """Draft chains, with noise of their own and distributions.

        All rows want drafts, and none is greedy.
        """
        raise NotImplementedError

    def _loop(self, shape: LoopShape) -> Tensor:
        """Run a loop over its inputs: int32, rows first."""
        raise NotImplementedError

    def _read(self, output: NDArray[np.int32], wanted: Sequence[int]) -> list[Guess]:
        """Return the drafts of a loop's output, of so many tokens at most."""
        raise NotImplementedError

    def _nodes(self, output: Tensor, count: int) -> DeviceNodes | None:
        """Return the drafts of `count` tokens in a loop's output; None if the host makes them."""
        raise NotImplementedError

    def _eager(self, rows: Sequence[DraftInput]) -> list[Guess]:
        """Do as `drafts` without a loop."""
        raise NotImplementedError
