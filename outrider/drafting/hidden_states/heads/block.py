"""Draft modules that guess a whole block of tokens in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.confidence import by_row, confidences_of_log_probs
from outrider.drafting.drafters import DraftInput
from outrider.drafting.graphs.batches import LoopBatches
from outrider.drafting.hidden_states.heads.base import CachedHead
from outrider.drafting.hidden_states.trees import (
    Guess,
    TargetDraws,
    guess_places,
    max_trees,
    trees_of_places,
)
from outrider.engine.attention.base import AttentionBackend


class BlockHead(CachedHead):
    """A module whose slots guess one token each, at the positions after the text, all at once.

    Row p of its KV cache is a function of the target's states up to p (and, by format, of the
    tokens up to p + 1), so it is written once, when the token is committed. The slots' rows lie
    behind and are overwritten. What a slot guesses does not depend on what others guess, unless a
    subclass says so. To `guess_chains`, it is a `OneShotHead` over the slots' outputs.
    """

    max_depth: int
    """Tokens that a block foresees."""
    follows_paths: ClassVar[bool] = False
    """`guess` follows paths token by token (`guess_paths`)."""

    def num_slots(self, depth: int) -> int:
        """Return the slots past the true rows that `depth` guesses take."""
        raise NotImplementedError

    def num_fed(self, depth: int) -> int:
        """Return the slots that `run` feeds where one row wants `depth` guesses, or more."""
        return self.num_slots(depth)

    def max_rows(self, depth: int, width: int) -> int:
        """Return how many rows guess `width` tokens at `depth` places at once, to bound memory.

        No row guesses deeper than `max_depth`.
        """
        return max_trees(max(min(depth, self.max_depth), width), self.vocab_size)

    def run(
        self, rows: Sequence[DraftInput], backend: AttentionBackend, page_size: int
    ) -> Tensor | None:
        """Feed rows; return the outputs of the slots of those that want drafts, which come first.

        The result is [n, depth, width], and `depth` the most tokens that one wants, or `max_depth`.
        Rows do not affect each other. None: none wants any.
        """
        raise NotImplementedError

    def outputs(
        self, features: Tensor, tokens: Tensor, batches: LoopBatches, backend: AttentionBackend
    ) -> Tensor:
        """Write the rows of a catch-up, and run blocks after its last tokens, int64 [n]: as `run`.

        May be captured, if the module can be.
        """
        raise NotImplementedError

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits over the target's vocabulary: [m, width] to [m, vocab]."""
        raise NotImplementedError

    def guess(
        self,
        states: Tensor,
        tokens: Tensor,  # noqa: ARG002 - the outputs tell it all
        draws: TargetDraws,
        depth: int,
        width: int,
    ) -> Tensor:
        """Return what trees are chosen from, of outputs [n, depth, ...]: as `guess_places`."""
        logits = self.logits(states[:, :depth].flatten(0, 1)).view(len(states), depth, -1)
        return guess_places(logits, draws, width)

    def trees(self, guesses: NDArray[np.int32], sizes: Sequence[int]) -> list[Guess]:
        """Return a tree per row, of at most `sizes[i]` nodes."""
        return trees_of_places(guesses, sizes)

    def chains(self, guesses: Tensor) -> Tensor:
        """Return the tokens of guesses of width 1: int32 [n, depth]."""
        return guesses[:, 0, :, 0]

    def confidences(self, guesses: NDArray[np.int32]) -> list[bytes]:
        """Return the confidence of each place's first token, by row, as in `Block.confidences`."""
        best = guesses[:, 1, :, 0].copy().view(np.float32)
        return by_row(confidences_of_log_probs(best), [best.shape[1]] * len(best))

    def begin(self, states: Tensor) -> Tensor:
        """Return outputs as the first `step` takes them."""
        return states

    def step(self, states: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the outputs, and float32 logits [n, vocab] of the slot at `depth`."""
        return states, self.logits(states[:, depth])
