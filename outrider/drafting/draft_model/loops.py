"""A draft model's loops: catch-up, K draws and the forwards between them in one launch.

Rows that no captured loop holds (masked rows, very long drafts) are drafted for eagerly.

Where candidates are wanted, too, rows with top_k, top_p or min_p run in loops of their own, which
cost a partial sort per token: the target refuses any token beyond its cuts. These cuts look at the
likeliest tokens only, without a wait for the device. A cut that they do not decide is left out.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.draft_port import DeviceNodes
from outrider.drafting.drafters import (
    AsyncLoop,
    Chain,
    DraftInput,
    FedRows,
    ForkBatch,
    Forks,
    StatesBehind,
)
from outrider.drafting.graphs.chains import chain_loop, draft_chains, draft_forks, run_loop
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.graphs.loops import CapturedLoops, LoopCapture, read_chains
from outrider.engine.batch import Model, RowSlice
from outrider.engine.graphs.capture import CapturableModel
from outrider.engine.graphs.prefill_graphs import PrefillGraphs
from outrider.engine.graphs.staging import PageLayout
from outrider.engine.sampling.sample import SamplingBatch


class BranchingModel(Model, Protocol):
    """A model whose pages can be copied."""

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy the keys and values of pages `source` int64 [n] to `target` [n]."""


class _CapturableModel(BranchingModel, CapturableModel, Protocol): ...


class EagerForks:
    """A `ForkDrafter` with any model on any device."""

    def __init__(self, model: BranchingModel) -> None:
        self._model = model
        self.page_size = model.page_size

    def captured_rows(self, num_rows: int) -> int:
        """Implement `ForkDrafter`."""
        return num_rows

    def forks(
        self,
        rows: FedRows,
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
        *,
        beyond: bool = False,
    ) -> ForkBatch:
        """Implement `ForkDrafter`."""
        self.copy(copies)
        forks = draft_forks(self._model, rows, num_tokens + beyond, fanout)
        return ForkBatch.split(forks, num_tokens)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target)."""
        if copies:
            pages = torch.tensor(copies).to(self._model.device, non_blocking=True)
            self._model.copy_pages(pages[:, 0], pages[:, 1])


class DraftModelLoops:
    """A `ChainDrafter`, `ForkDrafter` and `AsyncDrafter` with captured loops.

    `forwards` feed what no loop catches up. Used from one thread.
    """

    max_tokens = sys.maxsize

    def __init__(
        self, model: _CapturableModel, capture: LoopCapture, forwards: PrefillGraphs | None = None
    ) -> None:
        self._model = model
        self._forwards = forwards
        self._sampler = capture.sampler
        self._eager = EagerForks(model)
        self.page_size = model.page_size
        layout = PageLayout(model.max_model_len, model.page_size, model.scratch_page, model.device)
        further = [shape.further for shape in capture.shapes if shape.fanout]
        capture = replace(capture, shapes=[*capture.shapes, *further])
        self._inputs = LoopInputs(capture.shapes, layout)
        self._loops = CapturedLoops(capture, self._inputs, self._loop)
        self._rows = sorted({shape.rows for shape in capture.shapes if shape.fanout})

    def draft(self, rows: Sequence[DraftInput]) -> list[Chain]:
        """Return what `draft_chains` returns, by captured loops where they hold the rows."""
        return self._loops.drafts(rows, read_chains, self._draft_eagerly)

    def _draft_eagerly(self, rows: Sequence[DraftInput]) -> list[Chain]:
        if not rows[0].wanted and self.feed([row.slice for row in rows]):
            return []
        return draft_chains(self._model, rows)

    def launch_after_verify(
        self, rows: Sequence[DraftInput], verify_output: Tensor, states: StatesBehind | None = None
    ) -> AsyncLoop[Chain] | None:
        """Implement `AsyncDrafter`."""
        return self._loops.launch_after_verify(rows, verify_output, states, read_chains, _nodes)

    def captured_rows(self, num_rows: int) -> int:
        """Implement `ForkDrafter`."""
        i = bisect_left(self._rows, num_rows)
        return self._rows[i] if i < len(self._rows) else num_rows

    def forks(
        self,
        rows: FedRows,
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
        *,
        beyond: bool = False,
    ) -> ForkBatch:
        """Implement `ForkDrafter`."""
        shape, count = self._loops.find(rows, num_tokens, fanout), len(rows.slices)
        if shape is not None:
            fetch, further = self._loops.launch(shape, rows, copies), None
            if beyond and shape.num_tokens == num_tokens:
                further = self._loops.launch_further(shape, count)
            if further is None:
                return ForkBatch.split(_to_forks(fetch(), fanout), num_tokens)
            return ForkBatch(
                lambda: _to_forks(fetch(), fanout), lambda: _to_forks(further(), fanout)
            )
        self._eager.copy(copies)
        pieces, eager = self._loops.divide(rows.slices, [num_tokens] * count, fanout)
        numbers = [some for some in (*pieces, eager) if some]
        parts = [
            (self._eager if some is eager else self).forks(
                rows.some(some), num_tokens, fanout, beyond=beyond
            )
            for some in numbers
        ]
        order = np.concatenate(numbers).argsort()
        return ForkBatch(
            lambda: Forks.joined([part.forks for part in parts])[order],
            lambda: Forks.joined([part.beyond for part in parts])[order],
        )

    def feed(self, slices: Sequence[RowSlice]) -> bool:
        """Feed rows that no draft is wanted for; False if no captured forward holds them."""
        return self._forwards is not None and self._forwards.feed(slices)

    def _loop(self, shape: LoopShape) -> Tensor:
        """Run the loop: as `chain_loop`, with candidates int32 [rows, K + 1, 2 * F]."""
        rows = self._inputs.rows(shape)
        batches = self._inputs.batches(shape, rows)
        forward, num_draws = self._model.logits, shape.num_steps + 1
        if not shape.fanout:
            return chain_loop(forward, batches, num_draws, self._sampler.choose)
        self._model.copy_pages(rows.source, rows.target)

        def draw(logits: Tensor, batch: SamplingBatch | None) -> tuple[Tensor, ...]:
            assert batch is not None
            top, gaps = self._sampler.candidates(logits, batch, shape.fanout)
            return top[:, 0], top, gaps

        _, *found = zip(*run_loop(forward, batches, num_draws, draw), strict=True)
        tops, gaps = (torch.stack(parts, dim=1) for parts in found)
        return torch.cat((tops.to(torch.int32), gaps.view(torch.int32)), dim=2)


def _nodes(chains: Tensor, count: int) -> DeviceNodes:
    return DeviceNodes(chains[:, :count])


def _to_forks(drafted: NDArray[np.int32], fanout: int) -> Forks:
    """Read a loop's output, perhaps of more candidates: int32 [rows, K + 1, 2 * F]."""
    captured = drafted.shape[2] // 2
    gaps = drafted[:, :, captured : captured + fanout].copy().view(np.float32)
    return Forks(drafted[:, :, :fanout], gaps)
