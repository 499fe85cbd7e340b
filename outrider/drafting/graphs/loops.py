"""Draft loops recorded at start, and which of them a batch takes.

Between the copy of the inputs and the copy of what was drafted the host does nothing. Loops are
recorded for some numbers of rows, tokens to catch up and draft tokens; a batch takes the smallest
that holds it. Rows that want fewer tokens get more, and are cut. Of a catch-up that is longer than
any loop's (a prompt) all but the last token is fed first, in a forward of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.draft_model.chains import ReadyRow
from outrider.drafting.graphs.draws import Draws
from outrider.drafting.graphs.loop_inputs import LoopInputs, LoopShape
from outrider.engine.batch import RowSlice
from outrider.engine.graphs.capture import Capture as Record, Work
from outrider.params import SamplingParams

Draft = TypeVar("Draft")
Numbered = Mapping[int, RowSlice]
"""Rows of a batch, by their place in it."""


def make_shapes(
    *,
    rows: Iterable[int],
    query_lens: Sequence[int],
    num_tokens: Sequence[int],
    fanout: int = 0,
    cut: bool = False,
) -> list[LoopShape]:
    """Loops for all combinations."""
    return [
        LoopShape(n, query_len, k, fanout, cut)
        for n in rows
        for query_len in query_lens
        for k in num_tokens
    ]


@dataclass(frozen=True, slots=True)
class Capture:
    """Which loops a method is to record, and how."""

    shapes: Sequence[LoopShape]
    record: Record
    draws: Draws
    on_progress: Callable[[int, int], None] = lambda done, total: None  # noqa: ARG005


class CapturedLoops:
    """The loops of one method, which share their inputs and the place of what they leave.

    `body` enqueues a loop and returns what it drafted, int32 of `output_shape`, rows first.
    Building it records them. Used from one thread.
    """

    def __init__(
        self,
        recording: Capture,
        inputs: LoopInputs,
        body: Callable[[LoopShape], Tensor],
        output_shape: Callable[[LoopShape], tuple[int, ...]],
    ) -> None:
        # The largest first: what they allocate serves the others.
        ordered = sorted(set(recording.shapes), key=_cost, reverse=True)
        self._smallest_first = ordered[::-1]
        self._inputs = inputs
        self._output_shapes = {shape: output_shape(shape) for shape in ordered}
        size = max(math.prod(each) for each in self._output_shapes.values())
        self._output = _Output(size, inputs.device)
        self._find = lru_cache(maxsize=4096)(self._smallest)
        self._loops: dict[LoopShape, Work] = {}
        for done, shape in enumerate(ordered, start=1):
            inputs.fill(shape, (), ())
            self._loops[shape] = recording.record(self._work(shape, body))
            recording.on_progress(done, len(ordered))

    def drafts(
        self,
        slices: Sequence[RowSlice],
        ready: Sequence[ReadyRow],
        read: Callable[[NDArray[np.int32], Sequence[int]], list[Draft]],
        feed: Callable[[Numbered], None],
        eager: Callable[[Numbered], list[Draft]],
        load: Callable[[Numbered], None] | None = None,
    ) -> list[Draft]:
        """Feed `slices`, then makes a draft for each of `ready`, which are the first of them.

        `read` makes them of what a loop left, and of how many tokens each row wanted. `feed` is
        told before what no loop catches up; `load`, which rows run next: it brings what they need
        besides their slices. `eager` drafts for the rows that no loop holds.
        """
        # A mask looks at every token before the next: no loop is that long.
        wanted = [row.wanted if row.mask is None else sys.maxsize for row in ready]
        sampling = [row.sampling for row in ready]
        if len(slices) == len(ready):  # as nearly always
            shape = self.find(slices, sampling, max(wanted), 0)
            if shape is not None:
                if load is not None:
                    load(dict(enumerate(slices)))
                return read(self.run(shape, slices, sampling), wanted)
        left = self._feed_long(slices, ready, feed)
        pieces, others = self.divide(left, wanted, 0)
        drafts: dict[int, Draft] = {}
        for piece in pieces:
            rows, theirs = [left[i] for i in piece], [wanted[i] for i in piece]
            params = [sampling[i] for i in piece]
            shape = self.find(rows, params, max(theirs), 0)
            assert shape is not None
            if load is not None:
                load(dict(zip(piece, rows, strict=True)))
            drafts.update(zip(piece, read(self.run(shape, rows, params), theirs), strict=True))
        if others:
            drafts.update(zip(others, eager({i: left[i] for i in others}), strict=True))
        return [drafts[i] for i in range(len(ready))]

    def divide(
        self, slices: Sequence[RowSlice], wanted: Sequence[int], fanout: int
    ) -> tuple[list[list[int]], list[int]]:
        """The rows that recorded loops hold, by loop, and those that none holds; in order."""
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

    def find(
        self,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
    ) -> LoopShape | None:
        """The smallest loop that holds all of these rows; None if there is none."""
        longest = max([len(row.token_ids) for row in slices])
        cut = any(params.top_k or params.top_p < 1.0 or params.min_p for params in sampling)
        return self._find(len(slices), longest, num_tokens, fanout, cut)

    def run(
        self,
        shape: LoopShape,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        copies: Sequence[tuple[int, int]] = (),
    ) -> NDArray[np.int32]:
        """What the loop of `shape` leaves for these rows, which it holds: int32 [rows, ...]."""
        with torch.inference_mode():
            self._inputs.fill(shape, slices, sampling, copies)
            return self._launch(shape, len(slices))()

    def launch_behind(
        self,
        shape: LoopShape,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        verify_output: Tensor,
    ) -> tuple[Tensor, Callable[[], NDArray[np.int32]]]:
        """Enqueues the loop for rows that `ChainInputs.follow` makes go on.

        Returns where it leaves its output, and what reads it: that is to be called before anything
        else of these loops is asked for.
        """
        with torch.inference_mode():
            self._inputs.fill(shape, slices, sampling)
            self._inputs.follow(shape, len(slices), verify_output)
            read = self._launch(shape, len(slices))
        return self._output.on_device(self._output_shapes[shape]), read

    def _launch(self, shape: LoopShape, count: int) -> Callable[[], NDArray[np.int32]]:
        """Enqueues the loop over what its inputs hold; what waits for the first `count` rows."""
        output_shape = self._output_shapes[shape]
        self._loops[shape]()
        self._output.send(output_shape)
        return lambda: self._output.read(output_shape)[:count]

    def _feed_long(
        self,
        slices: Sequence[RowSlice],
        ready: Sequence[ReadyRow],
        feed: Callable[[Numbered], None],
    ) -> list[RowSlice]:
        """What is left to catch up of the rows that are ready.

        `feed` gets what no loop catches up: of ready rows all but the last token, whose logits the
        draft begins with, and whatever is not ready. A drafting of its own for these would be many
        launches, and kernels that nobody compiled at the start.
        """
        left = list(slices[: len(ready)])
        long = dict(enumerate(slices[len(ready) :], start=len(ready)))
        for i, row in enumerate(ready):
            tokens, start = left[i].token_ids, left[i].start
            too_long = row.mask is None and not self._holds(len(tokens), row.wanted)
            if too_long and self._holds(1, row.wanted):
                long[i] = left[i]._replace(token_ids=tokens[:-1])
                left[i] = left[i]._replace(token_ids=tokens[-1:], start=start + len(tokens) - 1)
        if long:
            feed(long)
        return left

    def _holds(self, query_len: int, num_tokens: int) -> bool:
        return self._find(1, query_len, num_tokens, 0, False) is not None

    def _smallest(
        self, rows: int, query_len: int, num_tokens: int, fanout: int, cut: bool
    ) -> LoopShape | None:
        fitting = [s for s in self._fitting(query_len, num_tokens, fanout) if s.rows >= rows]
        # Chains are cut in any loop. Else, without one that cuts, rows are drafted for as if they
        # did not.
        return next((shape for shape in fitting if shape.cut == cut), next(iter(fitting), None))

    def _fitting(self, query_len: int, num_tokens: int, fanout: int) -> list[LoopShape]:
        """The loops that hold such rows, the smallest first."""
        return [
            shape
            for shape in self._smallest_first
            if shape.query_len >= query_len
            and shape.num_tokens >= num_tokens
            and (shape.fanout >= fanout if fanout else shape.fanout == 0)
        ]

    def _work(self, shape: LoopShape, body: Callable[[LoopShape], Tensor]) -> Work:
        @torch.inference_mode()
        def work() -> None:
            self._output.write(body(shape))

        return work


def chains(drafted: NDArray[np.int32], wanted: Sequence[int]) -> list[list[int]]:
    """Of what a loop of chains left, int32 [rows, tokens, 1], each row's first tokens."""
    tokens: list[list[int]] = drafted[:, :, 0].tolist()
    return [row[:n] for row, n in zip(tokens, wanted, strict=True)]


class _Output:
    """What a loop leaves, at one place of the device for all loops, and its copy on the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._numbers: NDArray[np.int32] = self._host.numpy()
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def write(self, numbers: Tensor) -> None:
        self._device[: numbers.numel()].copy_(numbers.flatten())

    def on_device(self, shape: tuple[int, ...]) -> Tensor:
        """What was left last, or will be by what is enqueued."""
        return self._device[: math.prod(shape)].view(shape)

    def send(self, shape: tuple[int, ...]) -> None:
        """Enqueues the copy to the host."""
        size = math.prod(shape)
        self._host[:size].copy_(self._device[:size], non_blocking=True)
        if self._done is not None:
            self._done.record()

    def read(self, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Wait for what was sent; a copy."""
        size = math.prod(shape)
        if self._done is not None:
            self._done.synchronize()
        return self._numbers[:size].reshape(shape).copy()


def _cost(shape: LoopShape) -> tuple[int, int, int, bool]:
    """Orders shapes: a forward more costs more than rows do."""
    tokens = shape.rows * (shape.query_len + shape.num_fed)
    return shape.num_steps, tokens, shape.fanout, shape.cut
