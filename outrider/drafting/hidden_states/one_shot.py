"""Draft from one state of the target, without keys and values: Medusa, MLP speculator.

After n committed tokens the head sees the target's state at n - 2, which is the last known one, and
the token at n - 1, which was drawn from it. So of a session's rows only the last is kept, a prompt
costs nothing, and a session that is opened anew can be drafted for at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.drafters import DraftInput
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.graphs.loops import CapturedLoops, LoopCapture
from outrider.drafting.hidden_states.forward import LEAD
from outrider.drafting.hidden_states.guesses import guess_chains
from outrider.drafting.hidden_states.heads.base import OneShotHead
from outrider.drafting.hidden_states.session import FeatureMethod, FeatureSession
from outrider.drafting.hidden_states.trees import TargetDraws, max_trees
from outrider.drafting.masks import DraftMasks
from outrider.drafting.proposer import (
    DEFAULT_LIMITS,
    NO_PACE,
    DraftRound,
    Pace,
    ProposerLimits,
    ProposerTraits,
    SessionKey,
)
from outrider.engine.batch import RowSlice
from outrider.engine.graphs.staging import PageLayout
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.sampling.coupled import Lane
from outrider.params import SamplingParams

_MAX_MODEL_LEN = 2**20
"""Longest session by default. The head itself sees one state, however long the text is."""

_ALL_POSITIONS: Final = 2**30  # on one page, which nobody reads


class OneShotLoops:
    """Guesses of `width` by captured loops of one row to catch up. Used from one thread.

    `num_tokens` of their shapes are levels. There are loops of as many rows for all levels.
    """

    def __init__(self, head: OneShotHead, capture: LoopCapture, width: int) -> None:
        self._head = head
        self._width = width
        self._sampler = capture.sampler
        layout = PageLayout(_ALL_POSITIONS, 2 * _ALL_POSITIONS, 0, head.device)
        self._inputs = LoopInputs(capture.shapes, layout, LEAD, head.features.width)
        self._most = max(shape.rows for shape in capture.shapes)
        self._loops = CapturedLoops(capture, self._inputs, self._loop)

    def guess(
        self,
        features: Sequence[Tensor],
        tokens: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        depth: int,
    ) -> NDArray[np.int32]:
        """Return what `OneShotHead.guess` does, of `depth` levels or more, which a loop must have.

        `features` are each row's last known state, bfloat16 [1, width] on the host, `tokens` its
        committed text.
        """
        slices = [RowSlice(text[-1:], len(text) - LEAD, (), 1) for text in tokens]
        guesses: list[NDArray[np.int32]] = []
        for start in range(0, len(slices), self._most):
            rows = slice(start, start + self._most)
            shape = self._loops.find(slices[rows], sampling[rows], depth, 0)
            assert shape is not None
            self._inputs.fill_features(features[rows])
            guesses.append(self._loops.run(shape, slices[rows], sampling[rows]))
        return np.concatenate(guesses)

    def _loop(self, shape: LoopShape) -> Tensor:
        rows = self._inputs.rows(shape)
        draws = TargetDraws(rows.sampling, self._sampler.noised)
        states, tokens = rows.features, rows.tokens[:, 0]
        assert states is not None
        return self._head.guess(states, tokens, draws, shape.num_tokens, self._width)


@dataclass(frozen=True, slots=True)
class _Row:
    """A session's part in one round."""

    state: FeatureSession
    mask: ConstraintEditor | None  # stands after the committed text; used up

    @property
    def length(self) -> int:
        return self.state.follower.length

    def features(self) -> Tensor:
        """Return the last known state: bfloat16 [1, width] on the host."""
        return self.state.rows(self.length - 2, self.length - 1)

    def input(self) -> DraftInput:
        follower = self.state.follower
        last = RowSlice(follower.tokens[-1:], self.length - LEAD, (), 1)
        return DraftInput(last, follower.wanted, follower.draft_sampling, self.mask)


class OneShotProposer(FeatureMethod):
    """Drafts with a `OneShotHead`, batched over sessions.

    With a tree width of 1 a draft is a chain, no longer than the head foresees; else a tree of as
    many nodes as draft tokens are wanted. Under rejection and within a constraint it is always a
    chain. With `capture` all others are guessed by loops of one row to catch up, which are captured
    now and must hold any batch.
    """

    def __init__(
        self,
        head: OneShotHead,
        *,
        method: str,
        name: str,
        limits: ProposerLimits = DEFAULT_LIMITS,
        masks: DraftMasks | None = None,
        capture: LoopCapture | None = None,
    ) -> None:
        max_draft_tokens, width = limits.max_draft_tokens, limits.tree_width
        if width == 1:
            max_draft_tokens = min(max_draft_tokens, head.max_depth)
        super().__init__(
            ProposerTraits(
                method=method,
                model=name,
                vocab_size=head.vocab_size,
                max_sessions=limits.max_sessions,
                max_draft_tokens=max_draft_tokens,
                max_model_len=limits.max_model_len or _MAX_MODEL_LEN,
                features=head.features,
            ),
            masks,
        )
        self._head = head
        self._width = width
        self._at_once = max_trees(width, head.vocab_size)
        self._loops = None if capture is None else OneShotLoops(head, capture, width)

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        done = DraftRound()
        trees: list[_Row] = []
        chains: dict[Lane, list[_Row]] = {}
        for state in self._asked(sessions):
            mask = state.mask
            row = _Row(state, None if mask is None else mask.after(state.follower.tokens))
            if state.follower.wanted == 0 or row.length < 2:
                done.drafts.append((state.key, DraftTree.chain(row.length, ())))
            elif not state.ready:
                done.unfinished.append(state.key)
            elif state.samples:
                chains.setdefault(Lane.DRAFT, []).append(row)
            elif row.mask is not None:
                chains.setdefault(Lane.SHARED, []).append(row)
            else:
                trees.append(row)
        started = time.perf_counter()
        with torch.inference_mode():
            for i in range(0, len(trees), self._at_once):
                done.drafts.extend(self._grow(trees[i : i + self._at_once]))
            for lane, rows in chains.items():
                for i in range(0, len(rows), self._at_once):
                    done.drafts.extend(self._chain(rows[i : i + self._at_once], lane))
        forward_s = time.perf_counter() - started if trees or chains else 0.0
        done.lost.extend(self._take_lost())  # last: if the head fails, the next round reports it
        return replace(done, forward_s=forward_s)

    def _grow(self, rows: Sequence[_Row]) -> list[tuple[SessionKey, DraftTree]]:
        sizes = [row.state.follower.wanted for row in rows]
        sampling = [row.state.follower.sampling for row in rows]
        depth = min(self._head.max_depth, max(sizes))
        if self._loops is None:
            draws = TargetDraws.of(sampling, [row.length for row in rows], self._head.device)
            width = min(self._width, max(sizes))
            guesses = self._head.guess(*self._inputs(rows), draws, depth, width).cpu().numpy()
        else:
            tokens = [row.state.follower.tokens for row in rows]
            guesses = self._loops.guess([row.features() for row in rows], tokens, sampling, depth)
        grown = self._head.trees(guesses, sizes)
        return [
            (row.state.key, DraftTree(row.length, tuple(tokens), tuple(parents)))
            for row, (tokens, parents) in zip(rows, grown, strict=True)
        ]

    def _chain(self, rows: Sequence[_Row], lane: Lane) -> list[tuple[SessionKey, DraftTree]]:
        inputs = [row.input() for row in rows]
        drawn = guess_chains(self._head, *self._inputs(rows), inputs, lane)
        return [
            (row.state.key, DraftTree.chain(row.length, *chain))
            for row, chain in zip(rows, drawn, strict=True)
        ]

    def _inputs(self, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
        """Return the last known state and the last token of each."""
        states = torch.cat([row.features() for row in rows]).to(
            self._head.device, non_blocking=True
        )
        tokens = torch.tensor([row.state.follower.tokens[-1] for row in rows])
        return states, tokens.to(self._head.device, non_blocking=True)

    def _used(self, state: FeatureSession) -> None:
        state.forget(len(state.follower.tokens) - 2)  # no later draft looks at them
