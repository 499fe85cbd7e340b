"""Draft loops captured at start, and the choice of a loop for a batch.

The host does nothing between the copy of the inputs and the copy of the drafts. Loops are captured
for some numbers of rows, tokens to catch up and draft tokens. A batch takes the smallest that holds
it. Rows that want fewer tokens get more, and are cut. Where no loop holds a catch-up (a prompt), a
forward of its own feeds all of it but the last token first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

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
    StatesBehind,
    features_of,
)
from outrider.drafting.graphs.beams import Beam, best_nodes, grow_beam
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.drafting.likeliest import BiasedLogits, cut_to_likeliest, likeliest, top_candidates
from outrider.engine.batch import RowSlice
from outrider.engine.graphs.buckets import CapturedBuckets
from outrider.engine.graphs.capture import Capture, Precompile, Work
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.engine.transfers import Fetch, begin_fetch

Draft = TypeVar("Draft")
Likeliest = Callable[[Tensor | BiasedLogits, SamplingBatch, int, int], tuple[Tensor, Tensor]]
"""Waits for a loop's output on the host: [rows, ...]."""


@dataclass(frozen=True, slots=True)
class DraftSampler:
    """The functions by which a loop samples, or others that do the same."""

    choose: Callable[[Tensor, SamplingBatch], Tensor] = sample
    candidates: Callable[[Tensor, SamplingBatch, int], tuple[Tensor, Tensor]] = top_candidates
    likeliest: Likeliest = likeliest
    grow_beam: Callable[[Beam, Tensor, Tensor, int, int], tuple[Beam, Tensor]] = grow_beam
    best_nodes: Callable[[Tensor, int], Tensor] = best_nodes


def triton_sampler() -> DraftSampler:
    """Return kernels that store no noise and cut without a wait; safe to capture."""
    # Imported here: without CUDA there may be no Triton.
    from outrider.engine.cuda import sampling as kernels

    def candidates(logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor]:
        logits = cut_to_likeliest(logits, batch)
        return kernels.choose_top(logits, batch.temperature, batch.seed, batch.position, count)

    def likeliest(
        logits: Tensor | BiasedLogits, batch: SamplingBatch, depth: int, count: int
    ) -> tuple[Tensor, Tensor]:
        if isinstance(logits, Tensor):
            return kernels.likeliest(logits, batch, depth, count)
        known, ids, bias = logits.known, logits.ids, logits.bias
        return kernels.likeliest(known, batch, depth, count, ids=ids, bias=bias)

    def grow_beam(
        beam: Beam, found: Tensor, log_probs: Tensor, width: int, num_nodes: int
    ) -> tuple[Beam, Tensor]:
        continued = beam.scores, beam.nodes, found, log_probs
        *grown, nodes = kernels.grow_beam(*continued, width, num_nodes)
        return Beam(*grown), nodes

    return DraftSampler(kernels.sample, candidates, likeliest, grow_beam, kernels.best_nodes)


@dataclass(frozen=True, slots=True)
class LoopCapture:
    """The loops that a method captures, and how."""

    shapes: Sequence[LoopShape]
    capture: Capture
    sampler: DraftSampler
    on_progress: Callable[[int, int], None] = lambda done, total: None  # noqa: ARG005
    precompile: Precompile = lambda works: None  # noqa: ARG005


class CapturedLoops:
    """The loops of one method, which share their inputs.

    `body` enqueues a loop and returns its drafts, int32 [rows, ...]. Used from one thread.
    """

    def __init__(
        self, capture: LoopCapture, inputs: LoopInputs, body: Callable[[LoopShape], Tensor]
    ) -> None:
        shapes = set(capture.shapes)
        self._inputs = inputs
        self._drafted: dict[LoopShape, Tensor] = {}  # the place of each loop's output
        self._find = lru_cache(maxsize=4096)(self._smallest)
        inputs.clear()
        capture.precompile([self._work(shape, body) for shape in shapes])
        done = 0

        def captured(shape: LoopShape) -> Work:
            nonlocal done
            inputs.fill(shape, FedRows((), ()))
            work = capture.capture(self._work(shape, body))
            done += 1
            capture.on_progress(done, len(shapes))
            return work

        self._loops = CapturedBuckets(shapes, captured, lambda shape: shape.cost)

    def drafts(
        self,
        rows: Sequence[DraftInput],
        read: Callable[[NDArray[np.int32], Sequence[int]], list[Draft]],
        eager: Callable[[Sequence[DraftInput]], list[Draft]],
    ) -> list[Draft]:
        """Feed rows, most tokens wanted first, and make a draft for each that wants one.

        `read` makes drafts of a loop's output and the numbers of tokens wanted. `eager` feeds or
        drafts what no loop holds.
        """
        # A mask looks at every token before the next: no loop is that long.
        wanted = [row.wanted if row.mask is None else sys.maxsize for row in rows if row.wanted]
        if len(wanted) == len(rows):  # as nearly always
            drafted = self._draft(rows, wanted, read)
            if drafted is not None:
                return drafted
        left = self._feed_long(rows, eager)
        pieces, others = self.divide([row.slice for row in left], wanted, 0)
        drafts: dict[int, Draft] = {}
        for piece in pieces:
            drafted = self._draft([left[i] for i in piece], [wanted[i] for i in piece], read)
            assert drafted is not None
            drafts.update(zip(piece, drafted, strict=True))
        if others:
            drafts.update(zip(others, eager([left[i] for i in others]), strict=True))
        return [drafts[i] for i in range(len(left))]

    def _draft(
        self,
        rows: Sequence[DraftInput],
        wanted: Sequence[int],
        read: Callable[[NDArray[np.int32], Sequence[int]], list[Draft]],
    ) -> list[Draft] | None:
        """Draft in one loop; None if no loop holds all of the rows."""
        fed = FedRows.of(rows)
        shape = self.find(fed, max(wanted), 0)
        if shape is None:
            return None
        if features := features_of(rows):
            self._inputs.fill_features(features)
        return read(self.launch(shape, fed)(), wanted)

    def divide(
        self, slices: Sequence[RowSlice], wanted: Sequence[int], fanout: int
    ) -> tuple[list[list[int]], list[int]]:
        """Return the rows that captured loops hold, by loop, and those that none holds."""
        rows = range(len(slices))
        lengths = [len(row.token_ids) for row in slices]
        held = [i for i in rows if self._find(1, lengths[i], wanted[i], fanout, False)]
        longest = max((lengths[i] for i in held), default=0)
        most = max((wanted[i] for i in held), default=0)
        limit = max((shape.rows for shape in self._fitting(longest, most, fanout)), default=0)
        if not held or not limit:
            return [], list(rows)
        pieces = [held[i : i + limit] for i in range(0, len(held), limit)]
        return pieces, sorted(set(rows).difference(held))

    def find(self, fed: FedRows, num_tokens: int, fanout: int) -> LoopShape | None:
        """Return the smallest loop that holds all of these rows, or None."""
        longest = max([len(row.token_ids) for row in fed.slices])
        return self._find(len(fed.slices), longest, num_tokens, fanout, fed.cut)

    def launch(
        self, shape: LoopShape, fed: FedRows, copies: Sequence[tuple[int, int]] = ()
    ) -> Fetch:
        """Enqueue a loop that holds these rows; return what waits for its output for them."""
        with torch.inference_mode():
            self._inputs.fill(shape, fed, copies)
            return self._launch(shape, len(fed.slices))

    def launch_further(self, shape: LoopShape, count: int) -> Fetch:
        """Enqueue one forward more of `count` rows of the last loop, which is of this shape.

        It feeds the best candidates at the ends of the rows' chains.
        """
        with torch.inference_mode():
            self._inputs.go_further(shape, self._drafted[shape][:, -1, 0])
            return self._launch(shape.further, count)

    def launch_after_verify(
        self,
        rows: Sequence[DraftInput],
        verify_output: Tensor,
        states: StatesBehind | None,
        read: Callable[[NDArray[np.int32], Sequence[int]], list[Draft]],
        nodes: Callable[[Tensor, int], DeviceNodes | None],
    ) -> AsyncLoop[Draft] | None:
        """Implement `AsyncDrafter`, with `read` as of `drafts`.

        `nodes` returns the drafts of so many tokens in a loop's output; None: the host makes them.
        """
        fed, num_tokens = FedRows.of(rows), max([row.wanted for row in rows])
        shape = self.find(fed, num_tokens, 0)
        if shape is None:
            return None
        with torch.inference_mode():
            if states is not None:
                counts = [len(row.token_ids) for row in fed.slices]
                fed = replace(fed, firsts=self._inputs.take_states(states, counts))
            self._inputs.fill(shape, fed)
            self._inputs.follow(shape, fed.slices, verify_output)
            fetch = self._launch(shape, len(rows))
            drafted = self._drafted[shape]
        return AsyncLoop(nodes(drafted, num_tokens), lambda wanted: read(fetch(), wanted))

    def _launch(self, shape: LoopShape, count: int) -> Fetch:
        """Enqueue the loop over its inputs, and the copy of `count` rows of its output."""
        self._loops[shape]()
        return begin_fetch(self._drafted[shape][:count])

    def _feed_long(
        self, rows: Sequence[DraftInput], feed: Callable[[Sequence[DraftInput]], list[Draft]]
    ) -> list[DraftInput]:
        """Feed what no loop catches up and return the rest of the rows that want drafts.

        Of such a row that is all but the last token, whose logits the draft begins with. A draft of
        its own would be many launches, and kernels that nobody compiled at start.
        """
        left: list[DraftInput] = []
        long: list[DraftInput] = []
        for row in rows:
            if not row.wanted:
                long.append(row)
                continue
            too_long = not self._holds(len(row.slice.token_ids), row.wanted)
            if row.mask is None and too_long and self._holds(1, row.wanted):
                begin, row = row.split()
                long.append(begin)
            left.append(row)
        if long:
            feed(long)
        return left

    def _holds(self, query_len: int, num_tokens: int) -> bool:
        return self._find(1, query_len, num_tokens, 0, False) is not None

    def _smallest(
        self, rows: int, query_len: int, num_tokens: int, fanout: int, cut: bool
    ) -> LoopShape | None:
        fitting = [s for s in self._fitting(query_len, num_tokens, fanout) if s.rows >= rows]
        # Chains are cut in any loop. Others are drafted without cuts if no loop makes them.
        return next((shape for shape in fitting if shape.cut == cut), next(iter(fitting), None))

    def _fitting(self, query_len: int, num_tokens: int, fanout: int) -> list[LoopShape]:
        """Return the loops that hold such rows, the smallest first."""
        return [
            shape
            for shape in self._loops
            if shape.query_len >= query_len
            and shape.num_tokens >= num_tokens
            and (shape.fanout >= fanout if fanout else shape.fanout == 0)
        ]

    def _work(self, shape: LoopShape, body: Callable[[LoopShape], Tensor]) -> Work:
        @torch.inference_mode()
        def work() -> None:
            drafted = body(shape)
            if shape not in self._drafted:  # this is the first run, which nothing captures
                self._drafted[shape] = torch.empty_like(drafted)
            self._drafted[shape].copy_(drafted)

        return work


def read_chains(drafted: NDArray[np.int32], wanted: Sequence[int]) -> list[Chain]:
    """Return each row's first tokens of what `chain_loop` drafted: int32 [rows, tokens]."""
    return [(row[:n], b"") for row, n in zip(drafted.tolist(), wanted, strict=True)]
