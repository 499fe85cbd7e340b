"""Step to StepResult: pack, forward, sample, verify; one small copy from the device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.batch import Model, RowSlice, pack
from outrider.engine.sampling.coupled import Lane, Sample, SamplingBatch, sample
from outrider.engine.sampling.logits import Adjustments, adjust
from outrider.engine.sampling.logprobs import Asked, drawn_logprobs, to_token_logprobs
from outrider.engine.sampling.tree_walk import padded, path_order, per_row, walk_trees
from outrider.engine.sampling.verification_rules import RuledRow, apply_rules, is_coupled, lane_of
from outrider.engine.sampling.verify import verify_rows
from outrider.engine.step import ScheduledRow, Step, StepResult
from outrider.engine.tree_mask import depths
from outrider.params import SamplingParams
from outrider.types import TokenLogprobs

MAX_EDITED = 2**25
"""Logits edited at once, of which there is a copy of 4 bytes each."""


class Pending(Protocol):
    """A step that is in flight."""

    @property
    def verified(self) -> Tensor | None:
        """As `Verdicts.tokens`, for work that is enqueued behind it; None: it is nowhere."""
        ...

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

    def takes_device_drafts(self, num_rows: int, num_drafted: int) -> bool:
        """Whether it verifies `Step.late` of so many rows, of so many tokens at the most."""
        ...


class Verified(NamedTuple):
    """What came of a step's rows that have logits."""

    tokens: Tensor
    """int64 [rows, 1 + width]: per row, drafts accepted, then what the target chose, padded."""
    logprobs: Tensor | None = None  # `drawn_logprobs`, if any row asks for them

    def on_host(self) -> Verified:
        """The same on the host, once the device has come so far."""
        tokens = self.tokens.to("cpu", non_blocking=True)  # pinned
        if self.logprobs is None:
            return Verified(tokens)
        return Verified(tokens, self.logprobs.to("cpu", non_blocking=True))


class Forwards(Protocol):
    """A faster way to do some of a model's forwards."""

    def logits(self, rows: Sequence[RowSlice]) -> Tensor | None:
        """What the model's `forward` returns for these rows; None: not this way."""
        ...


class Runner:
    """Runs any step on any device, eagerly. Knows nothing of requests but their sampling."""

    def __init__(
        self, model: Model, *, sample: Sample = sample, forwards: Forwards | None = None
    ) -> None:
        self.model = model
        self._sample = sample
        self._forwards = forwards

    def launch(self, step: Step) -> Pending:
        """On a CPU nothing can be enqueued: there `wait` does the work."""
        return _Lazy(self, step) if self.model.device.type == "cpu" else _Enqueued(self, step)

    def takes_device_drafts(self, num_rows: int, num_drafted: int) -> bool:  # noqa: ARG002
        """It needs the drafts when it packs the step."""
        return False

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """The step's logits [num_logits, vocab_size]. What the model raises passes through."""
        slices = [row.slice for row in step.rows]
        logits = None if self._forwards is None else self._forwards.logits(slices)
        if logits is not None:
            return logits
        return self.model.forward(pack(slices, self.model.page_size, self.model.device))

    @torch.inference_mode()
    def verify(self, step: Step, logits: Tensor) -> Verified:
        """Draws from `logits`, and compares with the drafts.

        What is accepted of a tree moves to the slots that it has in the text.
        """
        rows = [row for row in step.rows if row.slice.num_logits]
        if not rows:
            return Verified(torch.empty((0, 1), dtype=torch.int64))
        drawn = self._draw(logits, rows)
        tell = any(row.seq.request.top_logprobs is not None for row in rows)
        order = None
        if any(row.slice.parents for row in rows):
            walk = walk_trees(drawn, rows, self.model.page_size)
            self.model.move_slots(walk.source, walk.target)
            tokens = walk.tokens
            if tell:
                order = path_order(walk.at, [row.slice.num_logits for row in rows])
        else:
            tokens = self._compared(drawn, rows)
        logprobs = drawn_logprobs(logits, drawn, asked(rows), order) if tell else None
        return Verified(tokens, logprobs)

    def _compared(self, drawn: Tensor, rows: list[ScheduledRow]) -> Tensor:
        """`Verified.tokens` of what was drawn, int64 [num_logits]."""
        counts = [row.slice.num_logits for row in rows]
        width = max(counts)
        if width == 1:
            return torch.stack((torch.zeros_like(drawn), drawn), dim=1)
        choices = per_row(drawn, counts)
        drafts = padded([row.draft for row in rows], width - 1, -1)
        accepted = verify_rows(drafts.to(drawn.device, non_blocking=True), choices)
        return torch.cat((accepted[:, None], choices), dim=1)

    def _draw(self, logits: Tensor, rows: list[ScheduledRow]) -> Tensor:
        """What the target chooses from each row of logits: int64 [num_logits]."""
        if not any(row.seq.edits_logits for row in rows):
            return self._draw_from(logits, rows)
        groups = list(_groups(rows, MAX_EDITED // logits.shape[1]))
        sizes = [sum(row.slice.num_logits for row in group) for group in groups]
        parts = zip(torch.split(logits, sizes), groups, strict=True)
        return torch.cat([self._draw_from(_edited(part, group), group) for part, group in parts])

    def _draw_from(self, logits: Tensor, rows: list[ScheduledRow]) -> Tensor:
        """`_draw` from logits as they are."""
        if all(row.seq.request.sampling.greedy for row in rows):
            return logits.argmax(dim=-1)
        drawn = self._sample(logits, self._sampling(rows))
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
            if row.slice.parents:
                first = end - count  # position of the first token that is drawn
                positions += [first, *(first + 1 + depth for depth in depths(row.slice.parents))]
            else:
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
    """A float32 copy of the rows' logits, as they want them edited."""
    logits = logits.to(torch.float32, copy=True)
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


def _groups(rows: list[ScheduledRow], max_logits: int) -> Iterator[list[ScheduledRow]]:
    """The rows in order, in groups of as many as have at most `max_logits`, or of one."""
    group: list[ScheduledRow] = []
    size = 0
    for row in rows:
        if group and size + row.slice.num_logits > max_logits:
            yield group
            group, size = [], 0
        group.append(row)
        size += row.slice.num_logits
    yield group


def asked(rows: Iterable[ScheduledRow]) -> list[Asked]:
    """What each row asks of `drawn_logprobs`."""
    return [(row.slice.num_logits, row.seq.request.top_logprobs) for row in rows]


class _Lazy:
    """A step that runs on the host once it is waited for."""

    verified = None

    def __init__(self, runner: Runner, step: Step) -> None:
        self._runner = runner
        self._step = step

    def wait(self) -> StepResult:
        began = time.perf_counter()
        logits = self._runner.forward(self._step)
        forwarded = time.perf_counter()
        verified = self._runner.verify(self._step, logits)
        tokens = verified.tokens.tolist()
        done = time.perf_counter()
        return to_result(self._step, tokens, verified.logprobs, forwarded - began, done - forwarded)


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
        verified = runner.verify(step, logits)
        self.verified: Tensor | None = verified.tokens
        self._verified = verified.on_host()
        done.record()

    def wait(self) -> StepResult:
        began, forwarded, done = self._events
        done.synchronize()
        forward_s = began.elapsed_time(forwarded) * 1e-3
        verify_s = forwarded.elapsed_time(done) * 1e-3
        tokens, logprobs = self._verified
        return to_result(self._step, tokens.tolist(), logprobs, forward_s, verify_s)


def to_result(
    step: Step,
    tokens: Sequence[Sequence[int]],
    logprobs: Tensor | None,
    forward_s: float,
    verify_s: float,
) -> StepResult:
    """From `Verified.tokens` and, on the host, `Verified.logprobs`."""
    with_logits = iter(tokens)
    choices: list[Sequence[int]] = []
    accepted: list[int] = []
    for row in step.rows:
        count, *chosen = next(with_logits) if row.slice.num_logits else (0,)
        choices.append(chosen)
        accepted.append(count)
    told = to_logprobs(step, logprobs, accepted)
    return StepResult(choices, accepted, forward_s, verify_s, told)


def to_logprobs(
    step: Step, logprobs: Tensor | None, accepted: Sequence[int]
) -> Sequence[tuple[TokenLogprobs, ...]]:
    """`StepResult.logprobs` from `Verified.logprobs` on the host."""
    if logprobs is None:
        return ()
    return to_token_logprobs(logprobs.tolist(), asked(step.rows), [n + 1 for n in accepted])
