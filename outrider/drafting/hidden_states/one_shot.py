"""Draft from one state of the target, without keys and values: Medusa, MLP speculator.

After n committed tokens the head sees the target's state at n - 2, which is the last known one, and
the token at n - 1, which was drawn from it. So of a session's rows only the last is kept, a prompt
costs nothing, and a session that is opened anew can be drafted for at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.drafters import DraftInput, FedRows, features_of
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
from outrider.engine.sampling.noise import Lane

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

    def guess(self, rows: Sequence[DraftInput], depth: int) -> NDArray[np.int32]:
        """Return what `OneShotHead.guess` does, of `depth` levels or more, which a loop must have.

        The rows' features are on the host.
        """
        guesses: list[NDArray[np.int32]] = []
        for start in range(0, len(rows), self._most):
            part = rows[start : start + self._most]
            fed = FedRows.of(part)
            shape = self._loops.find(fed, depth, 0)
            assert shape is not None
            self._inputs.fill_features(features_of(part))
            guesses.append(self._loops.launch(shape, fed)())
        return np.concatenate(guesses)

    def _loop(self, shape: LoopShape) -> Tensor:
        rows = self._inputs.rows(shape)
        draws = TargetDraws(rows.sampling, self._sampler)
        states, tokens = rows.features, rows.tokens[:, 0]
        assert states is not None
        return self._head.guess(states, tokens, draws, shape.num_tokens, self._width)


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
        rows: dict[Lane | None, list[tuple[SessionKey, DraftInput]]] = {}  # by lane of chains
        for state in self._asked(sessions):
            if state.follower.wanted == 0 or state.follower.length < LEAD:
                done.drafts.append((state.key, DraftTree.chain(state.follower.length, ())))
            elif not state.ready:
                done.unfinished.append(state.key)
            else:
                row = _input(state)
                masked = None if row.mask is None else Lane.SHARED
                lane = Lane.DRAFT if state.samples else masked
                rows.setdefault(lane, []).append((state.key, row))
        started = time.perf_counter()
        with torch.inference_mode():
            for lane, of_lane in rows.items():
                for i in range(0, len(of_lane), self._at_once):
                    keys, part = zip(*of_lane[i : i + self._at_once], strict=True)
                    trees = self._trees(part) if lane is None else self._chains(part, lane)
                    done.drafts.extend(zip(keys, trees, strict=True))
        forward_s = time.perf_counter() - started if rows else 0.0
        done.lost.extend(self._take_lost())  # last: if the head fails, the next round reports it
        return replace(done, forward_s=forward_s)

    def _trees(self, rows: Sequence[DraftInput]) -> list[DraftTree]:
        sizes = [row.wanted for row in rows]
        depth = min(self._head.max_depth, max(sizes))
        if self._loops is None:
            sampling, lengths = [row.sampling for row in rows], [_length(row) for row in rows]
            draws = TargetDraws.of(sampling, lengths, self._head.device)
            width = min(self._width, max(sizes))
            guesses = self._head.guess(*self._inputs(rows), draws, depth, width).cpu().numpy()
        else:
            guesses = self._loops.guess(rows, depth)
        grown = self._head.trees(guesses, sizes)
        return [guess.tree(_length(row)) for row, guess in zip(rows, grown, strict=True)]

    def _chains(self, rows: Sequence[DraftInput], lane: Lane) -> list[DraftTree]:
        drawn = guess_chains(self._head, *self._inputs(rows), rows, lane)
        pairs = zip(rows, drawn, strict=True)
        return [DraftTree.chain(_length(row), *chain) for row, chain in pairs]

    def _inputs(self, rows: Sequence[DraftInput]) -> tuple[Tensor, Tensor]:
        """Return the last known state and the last token of each."""
        states, tokens = torch.cat(features_of(rows)), [row.slice.token_ids[-1] for row in rows]
        device = self._head.device
        return (
            states.to(device, non_blocking=True),
            torch.tensor(tokens).to(device, non_blocking=True),
        )

    def _used(self, state: FeatureSession) -> None:
        state.forget(len(state.follower.tokens) - 2)  # no later draft looks at them


def _input(state: FeatureSession) -> DraftInput:
    """Return a session's last token, with the last known state."""
    follower, length = state.follower, state.follower.length
    mask = None if state.mask is None else state.mask.after(follower.tokens)
    last = RowSlice(follower.tokens[-1:], length - LEAD, (), 1)
    features = state.rows(length - LEAD, length - 1)
    return DraftInput(last, follower.wanted, follower.draft_sampling, mask, features)


def _length(row: DraftInput) -> int:
    """Return the length of a row's text."""
    return row.end + LEAD - 1
