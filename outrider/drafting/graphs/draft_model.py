"""A draft model's loop recorded: catch-up, K draws and the forwards between them in one replay.

What no recorded loop holds (rows within a constraint, very long drafts) goes the eager way.

Where a token's rivals are wanted, too, rows with top_k, top_p or min_p run in loops of their own,
which cost a partial sort per token: a token that the target must refuse is no draft. There the cuts
look at the likeliest tokens only, so that nothing waits for the device; a cut that they do not
decide is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.ahead.branches import BranchingModel, EagerForks
from outrider.drafting.draft_model.async_drafts import AsyncLine, AsyncLoop
from outrider.drafting.draft_model.chains import Forks, ReadyRow, draft_chains
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.graphs.loops import Capture, CapturedLoops, Numbered, chains
from outrider.engine.batch import PackedBatch, RowSlice
from outrider.engine.graphs.prefill_graphs import PrefillGraphs
from outrider.engine.sampling.coupled import SamplingBatch
from outrider.params import SamplingParams


class CapturableModel(BranchingModel, Protocol):
    """A model whose forward can be recorded."""

    @property
    def scratch_page(self) -> int:
        """A page that no sequence ever gets."""
        ...

    def logits(self, batch: PackedBatch) -> Tensor:
        """What `forward` returns, in the model's dtype."""
        ...


class DraftModelLoops:
    """Implements `ChainDrafter` and `ForkDrafter` with recorded loops.

    Building it records them; `forwards` feed what no loop catches up. Used from one thread.
    """

    max_tokens = sys.maxsize

    def __init__(
        self,
        model: CapturableModel,
        recording: Capture,
        forwards: PrefillGraphs | None = None,
    ) -> None:
        self._model = model
        self._forwards = forwards
        self._draws = recording.draws
        self._eager = EagerForks(model)
        self.page_size = model.page_size
        self._inputs = LoopInputs(
            recording.shapes,
            max_model_len=model.max_model_len,
            page_size=model.page_size,
            scratch_page=model.scratch_page,
            device=model.device,
        )
        self._loops = CapturedLoops(recording, self._inputs, self._loop, _output_shape)

    def draft(self, slices: Sequence[RowSlice], ready: Sequence[ReadyRow]) -> list[list[int]]:
        """What `draft_chains` returns, by recorded loops as far as they hold the rows."""

        def feed(long: Numbered) -> None:
            rows = [*long.values()]
            if not self.feed(rows):
                draft_chains(self._model, rows, ())

        def eager(rows: Numbered) -> list[list[int]]:
            return draft_chains(self._model, [*rows.values()], [ready[i] for i in rows])

        return self._loops.drafts(slices, ready, chains, feed, eager)

    def launch_after_verify(
        self,
        lines: Sequence[AsyncLine],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        verify_output: Tensor,
    ) -> AsyncLoop | None:
        """What `AsyncDrafter` says."""
        slices = [
            RowSlice((line.num_guesses, 0), line.length + line.num_guesses, line.block_table, 1)
            for line in lines
        ]
        shape = self._loops.find(slices, sampling, num_tokens, 0)
        if shape is None:
            return None
        tokens, read = self._loops.launch_behind(shape, slices, sampling, verify_output)
        return AsyncLoop(
            tokens[:, :num_tokens, 0], lambda: chains(read(), [num_tokens] * len(lines))
        )

    def forks(
        self,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Forks:
        """What `ForkDrafter.forks` says."""
        shape = self._loops.find(slices, sampling, num_tokens, fanout)
        if shape is not None:
            drafted = self._loops.run(shape, slices, sampling, copies)
            return _to_forks(drafted, num_tokens, fanout)
        self._eager.copy(copies)
        candidates = np.empty((len(slices), num_tokens + 1, fanout), np.int32)
        gaps = np.empty(candidates.shape, np.float32)
        pieces, eager = self._loops.divide(slices, [num_tokens] * len(slices), fanout)
        for rows in (*pieces, eager):
            if not rows:
                continue
            part = (self._eager if rows is eager else self).forks(
                [slices[i] for i in rows], [sampling[i] for i in rows], num_tokens, fanout
            )
            candidates[rows], gaps[rows] = part.candidates, part.gaps
        return Forks(candidates, gaps)

    def feed(self, slices: Sequence[RowSlice]) -> bool:
        """Feed rows that no draft is wanted for; False if no recorded forward holds them."""
        return self._forwards is not None and self._forwards.feed(slices)

    def _loop(self, shape: LoopShape) -> Tensor:
        """int32 [rows, places, numbers per place]"""
        inputs = self._inputs.batches(shape)
        if shape.fanout:
            self._model.copy_pages(inputs.rows.source, inputs.rows.target)
        drawn: list[Tensor] = []
        logits = self._model.logits(inputs.catch_up)
        tokens = self._draw(logits, inputs.rows.sampling, shape.fanout, drawn)
        for step in range(shape.num_steps):
            batch, sampling = inputs.step(tokens, step)
            tokens = self._draw(self._model.logits(batch), sampling, shape.fanout, drawn)
        return torch.stack(drawn, dim=1)

    def _draw(
        self, logits: Tensor, sampling: SamplingBatch, fanout: int, drawn: list[Tensor]
    ) -> Tensor:
        """The tokens int64 [rows]; appends what is to be known of them, int32 [rows, numbers]."""
        if not fanout:
            tokens = self._draws.choose(logits, sampling)
            drawn.append(tokens.to(torch.int32)[:, None])
            return tokens
        top, gaps = self._draws.candidates(logits, sampling, fanout)
        drawn.append(torch.cat((top.to(torch.int32), gaps.view(torch.int32)), dim=1))
        return top[:, 0]


def _to_forks(drafted: NDArray[np.int32], num_tokens: int, fanout: int) -> Forks:
    """From what a loop left, perhaps of more tokens and candidates: int32 [rows, K + 1, 2 * F]."""
    places = drafted[:, : num_tokens + 1]
    recorded = drafted.shape[2] // 2
    gaps = places[:, :, recorded : recorded + fanout].copy().view(np.float32)
    return Forks(places[:, :, :fanout], gaps)


def _output_shape(shape: LoopShape) -> tuple[int, ...]:
    return shape.rows, shape.num_steps + 1, max(1, 2 * shape.fanout)
