"""The draft loop recorded: catch-up, K draws and the forwards between them in one replay.

Between the copy of the inputs and the copy of the drafted tokens the host does nothing. Loops are
recorded at start for some numbers of rows, tokens to catch up and draft tokens; a batch takes the
smallest that holds it. Rows that want fewer tokens get more, and are cut. What no recorded loop
holds (prompts, long catch-ups) goes the eager way.

Rows with top_k, top_p or min_p run in loops of their own, which cost a partial sort per token: a
token that the target must refuse is no draft. There the cuts look at the likeliest tokens only, so
that nothing waits for the device; a cut that they do not decide is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.branches import BranchingModel, EagerForks
from outrider.drafting.candidates import top_candidates
from outrider.drafting.chain_inputs import ChainInputs, LoopShape
from outrider.drafting.draft_steps import Forks, ReadyRow, draft_chains
from outrider.engine.batch import PackedBatch, RowSlice
from outrider.engine.cuda.graphs import Record, Work
from outrider.engine.sampling import SamplingBatch, sample
from outrider.params import SamplingParams


class RecordableModel(BranchingModel, Protocol):
    """A model whose forward can be recorded."""

    @property
    def scratch_page(self) -> int:
        """A page that no sequence ever gets."""
        ...

    def logits(self, batch: PackedBatch) -> Tensor:
        """What `forward` returns, in the model's dtype."""
        ...


class Draws(Protocol):
    """How a loop draws tokens from logits [n, vocab] of any dtype."""

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """int64 [n], as `sample`."""
        ...

    def candidates(self, logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor]:
        """int64 [n, count] and float32 [n, count], as `top_candidates`."""
        ...


class TorchDraws:
    """`Draws` in torch's operations. With cuts they wait for the device: not to be recorded."""

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sample(logits, batch)

    def candidates(self, logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor]:
        return top_candidates(logits, batch, count)


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


class GraphChains:
    """Implements `ChainDrafter` and `ForkDrafter` with recorded loops of `shapes`.

    Building it records them. Used from one thread.
    """

    max_tokens = sys.maxsize

    def __init__(
        self,
        model: RecordableModel,
        shapes: Iterable[LoopShape],
        *,
        record: Record,
        draws: Draws,
        on_progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
    ) -> None:
        self._model = model
        self._draws = draws
        self._eager = EagerForks(model)
        self.page_size = model.page_size
        # The largest first: what they allocate serves the others.
        ordered = sorted(set(shapes), key=_cost, reverse=True)
        self._smallest_first = ordered[::-1]
        self._inputs = ChainInputs(
            ordered,
            max_model_len=model.max_model_len,
            page_size=model.page_size,
            scratch_page=model.scratch_page,
            device=model.device,
        )
        self._output = _Output(max(_output_size(shape) for shape in ordered), model.device)
        self._find = lru_cache(maxsize=4096)(self._smallest)
        self._loops: dict[LoopShape, Work] = {}
        for done, shape in enumerate(ordered, start=1):
            self._inputs.fill(shape, (), ())
            self._loops[shape] = record(self._loop(shape))
            on_progress(done, len(ordered))

    def draft(self, slices: Sequence[RowSlice], ready: Sequence[ReadyRow]) -> list[list[int]]:
        """What `draft_chains` returns, by recorded loops as far as they hold the rows."""
        pieces, eager = self._divide(slices[: len(ready)], [row.wanted for row in ready], 0)
        chains: list[list[int]] = [[] for _ in ready]
        for rows in pieces:
            drafted = self._run(
                [slices[i] for i in rows],
                [ready[i].sampling for i in rows],
                max(ready[i].wanted for i in rows),
                0,
            )
            assert drafted is not None
            for i, chain in zip(rows, drafted[:, :, 0].tolist(), strict=True):
                chains[i] = chain[: ready[i].wanted]
        rest = [*[slices[i] for i in eager], *slices[len(ready) :]]
        if rest:
            drafts = draft_chains(self._model, rest, [ready[i] for i in eager])
            for i, chain in zip(eager, drafts, strict=True):
                chains[i] = chain
        return chains

    def forks(
        self,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Forks:
        """What `ForkDrafter.forks` says."""
        drafted = self._run(slices, sampling, num_tokens, fanout, copies)
        if drafted is not None:
            return _to_forks(drafted, num_tokens, fanout)
        self._eager.copy(copies)
        candidates = np.empty((len(slices), num_tokens + 1, fanout), np.int32)
        gaps = np.empty(candidates.shape, np.float32)
        pieces, eager = self._divide(slices, [num_tokens] * len(slices), fanout)
        for rows in (*pieces, eager):
            if not rows:
                continue
            part = (self._eager if rows is eager else self).forks(
                [slices[i] for i in rows], [sampling[i] for i in rows], num_tokens, fanout
            )
            candidates[rows], gaps[rows] = part.candidates, part.gaps
        return Forks(candidates, gaps)

    def _divide(
        self, slices: Sequence[RowSlice], wanted: Sequence[int], fanout: int
    ) -> tuple[list[list[int]], list[int]]:
        """The rows that recorded loops hold, by loop, and those that none holds; in order."""
        lengths = [len(row.token_ids) for row in slices]
        rows = range(len(slices))
        held = [i for i in rows if self._find(1, lengths[i], wanted[i], fanout, False)]
        longest = max((lengths[i] for i in held), default=0)
        most = max((wanted[i] for i in held), default=0)
        limit = max((shape.rows for shape in self._fitting(longest, most, fanout)), default=0)
        if not held or not limit:
            return [], list(rows)
        pieces = [held[i : i + limit] for i in range(0, len(held), limit)]
        return pieces, sorted(set(rows).difference(held))

    def _run(
        self,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
    ) -> NDArray[np.int32] | None:
        """Int32 [rows, places, numbers per place]; None if no recorded loop holds them."""
        longest = max(len(row.token_ids) for row in slices)
        cut = any(params.top_k or params.top_p < 1.0 or params.min_p for params in sampling)
        shape = self._find(len(slices), longest, num_tokens, fanout, cut)
        if shape is None:
            return None
        with torch.inference_mode():
            self._inputs.fill(shape, slices, sampling, copies)
            self._loops[shape]()
            numbers = self._output.read(_output_size(shape))
        return numbers.reshape(shape.rows, -1, max(1, 2 * shape.fanout))[: len(slices)]

    def _smallest(
        self, rows: int, query_len: int, num_tokens: int, fanout: int, cut: bool
    ) -> LoopShape | None:
        fitting = [s for s in self._fitting(query_len, num_tokens, fanout) if s.rows >= rows]
        # Without a loop that cuts, rows are drafted for as if they did not.
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

    def _loop(self, shape: LoopShape) -> Work:
        @torch.inference_mode()
        def loop() -> None:
            inputs = self._inputs.batches(shape)
            if shape.fanout:
                self._model.copy_pages(inputs.source, inputs.target)
            drawn: list[Tensor] = []
            logits = self._model.logits(inputs.catch_up)
            tokens = self._draw(logits, inputs.sampling, shape.fanout, drawn)
            for step in range(shape.num_steps):
                batch, sampling = inputs.step(tokens, step)
                tokens = self._draw(self._model.logits(batch), sampling, shape.fanout, drawn)
            self._output.write(torch.stack(drawn, dim=1))

        return loop

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


class _Output:
    """What a loop leaves, at one place of the device for all loops, and its copy on the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def write(self, numbers: Tensor) -> None:
        self._device[: numbers.numel()].copy_(numbers.flatten())

    def read(self, size: int) -> NDArray[np.int32]:
        """Waits for what was enqueued; a copy."""
        self._host[:size].copy_(self._device[:size], non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        return self._host[:size].numpy().copy()


def _to_forks(drafted: NDArray[np.int32], num_tokens: int, fanout: int) -> Forks:
    """From what a loop left, perhaps of more tokens and candidates: int32 [rows, K + 1, 2 * F]."""
    places = drafted[:, : num_tokens + 1]
    recorded = drafted.shape[2] // 2
    gaps = places[:, :, recorded : recorded + fanout].copy().view(np.float32)
    return Forks(places[:, :, :fanout], gaps)


def _output_size(shape: LoopShape) -> int:
    return shape.rows * (shape.num_steps + 1) * max(1, 2 * shape.fanout)


def _cost(shape: LoopShape) -> tuple[int, int, int, bool]:
    """Orders shapes: a forward more costs more than rows do."""
    tokens = shape.rows * (shape.query_len + shape.num_steps)
    return shape.num_steps, tokens, shape.fanout, shape.cut
