"""Step to StepResult: pack, forward, sample, verify; one small copy from the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batch import Model, pack
from outrider.engine.logits import Adjustments, adjust
from outrider.engine.rules import RuledRow, apply_rules, is_coupled, lane_of
from outrider.engine.sampling import Lane, SamplingBatch, sample
from outrider.engine.scheduler import ScheduledRow, Step, StepResult
from outrider.engine.verifier import verify_rows
from outrider.params import SamplingParams


class Pending(Protocol):
    """A step that is in flight."""

    def wait(self) -> StepResult:
        """Blocks until the step's one small copy has reached the host.

        Raises what the forward raised. Called once.
        """
        ...


class StepRunner(Protocol):
    """The model's side of a step. One step is in flight at most."""

    def launch(self, step: Step) -> Pending:
        """Enqueues the step's work and returns. May raise what the forward raises."""
        ...


class Runner:
    """Runs any step on any device, eagerly. Knows nothing of requests but their sampling."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def launch(self, step: Step) -> Pending:
        """On a CPU nothing can be enqueued: there `wait` does the work."""
        return _Lazy(self, step) if self.model.device.type == "cpu" else _Enqueued(self, step)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """The step's logits [num_logits, vocab_size]. What the model raises passes through."""
        batch = pack([row.slice for row in step.rows], self.model.page_size, self.model.device)
        return self.model.forward(batch)

    @torch.inference_mode()
    def verify(self, step: Step, logits: Tensor) -> Tensor:
        """Per row that has logits: drafts accepted, then what the target chose, padded.

        int64 [rows, 1 + width].
        """
        rows = [row for row in step.rows if row.slice.num_logits]
        if not rows:
            return torch.empty((0, 1), dtype=torch.int64)
        drawn = self._draw(_edited(logits, rows), rows)
        counts = [row.slice.num_logits for row in rows]
        width = max(counts)
        if width == 1:
            return torch.stack((torch.zeros_like(drawn), drawn), dim=1)
        padding = (-1,) * (width - 1)
        drafts = torch.tensor([(row.draft + padding)[: width - 1] for row in rows])
        if min(counts) < width:
            starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
            at = (starts[:, None] + torch.arange(width)).clamp(max=len(drawn) - 1)
            drawn = drawn[at.to(drawn.device, non_blocking=True)]
        choices = drawn.view(len(rows), width)
        accepted = verify_rows(drafts.to(drawn.device, non_blocking=True), choices)
        return torch.cat((accepted[:, None], choices), dim=1)

    def _draw(self, logits: Tensor, rows: list[ScheduledRow]) -> Tensor:
        """What the target chooses from each row of logits: int64 [num_logits]."""
        if all(row.seq.request.sampling.greedy for row in rows):
            return logits.argmax(dim=-1)
        drawn = sample(logits, self._sampling(rows))
        ruled = _ruled(rows)
        if ruled:
            apply_rules(logits, ruled, drawn)
        return drawn

    def _sampling(self, rows: list[ScheduledRow]) -> SamplingBatch:
        """The token after each of a row's last `num_logits` tokens is drawn."""
        params: list[SamplingParams] = []
        positions: list[int] = []
        lanes: list[Lane] = []
        for row in rows:
            count = row.slice.num_logits
            end = row.slice.start + len(row.slice.token_ids) + 1
            params += [row.seq.request.sampling] * count
            positions += range(end - count, end)
            lanes += [lane_of(row.seq.request)] * count
        return SamplingBatch.build(params, positions, self.model.device, lanes)


def _ruled(rows: list[ScheduledRow]) -> list[RuledRow]:
    """The rows whose drafts are not verified by the coupled rule."""
    ruled: list[RuledRow] = []
    first = 0
    for row in rows:
        request = row.seq.request
        if row.draft and not is_coupled(request):
            ruled.append(
                RuledRow(
                    first=first,
                    draft=row.draft,
                    draft_probs=row.draft_probs,
                    position=row.slice.start + len(row.slice.token_ids) - len(row.draft),
                    sampling=request.sampling,
                    verification=request.speculation.verification,
                )
            )
        first += row.slice.num_logits
    return ruled


def _edited(logits: Tensor, rows: list[ScheduledRow]) -> Tensor:
    """The logits as the rows want them edited; float32, and changed in place, if any does."""
    if not any(row.seq.edits_logits for row in rows):
        return logits
    logits = logits.float()
    adjustments: list[Adjustments] = []
    start = 0
    for row in rows:
        end = start + row.slice.num_logits
        for editor in row.seq.editors:
            editor.edit(logits[start:end], row.draft)
        if row.seq.adjuster is not None:
            own = row.seq.adjuster.adjustments(row.draft)
            adjustments.append(own._replace(rows=own.rows + start))
        start = end
    if adjustments:
        adjust(logits, adjustments)
    return logits


class _Lazy:
    """A step that runs on the host once it is waited for."""

    def __init__(self, runner: Runner, step: Step) -> None:
        self._runner = runner
        self._step = step

    def wait(self) -> StepResult:
        began = time.perf_counter()
        logits = self._runner.forward(self._step)
        forwarded = time.perf_counter()
        verified = self._runner.verify(self._step, logits).tolist()
        done = time.perf_counter()
        return to_result(self._step, verified, forwarded - began, done - forwarded)


class _Enqueued:
    """A step on the current CUDA stream."""

    def __init__(self, runner: Runner, step: Step) -> None:
        self._step = step
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        ]
        began, forwarded, done = self._events
        began.record()
        logits = runner.forward(step)
        forwarded.record()
        self._verified = runner.verify(step, logits).to("cpu", non_blocking=True)  # pinned
        done.record()

    def wait(self) -> StepResult:
        began, forwarded, done = self._events
        done.synchronize()
        forward_s = began.elapsed_time(forwarded) * 1e-3
        verify_s = forwarded.elapsed_time(done) * 1e-3
        return to_result(self._step, self._verified.tolist(), forward_s, verify_s)


def to_result(
    step: Step, verified: Sequence[Sequence[int]], forward_s: float, verify_s: float
) -> StepResult:
    """`verified`: for each row that has logits, drafts accepted and then its choices."""
    with_logits = iter(verified)
    choices: list[Sequence[int]] = []
    accepted: list[int] = []
    for row in step.rows:
        count, *chosen = next(with_logits) if row.slice.num_logits else (0,)
        choices.append(chosen)
        accepted.append(count)
    return StepResult(choices, accepted, forward_s, verify_s)
