"""Step to StepResult: pack, forward, sample, verify; one small copy from the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.draft_tree import depths
from outrider.engine.batch import Model, RowSlice, grouped, pack
from outrider.engine.events import elapsed_seconds, make_events
from outrider.engine.sampling.logits import Adjustments, adjust
from outrider.engine.sampling.logprobs import (
    RowLogprobs,
    drawn_logprobs,
    split_prompt_logits,
    split_rows,
    to_token_logprobs,
)
from outrider.engine.sampling.noise import Lane
from outrider.engine.sampling.sample import Sample, SamplingBatch, sample
from outrider.engine.sampling.synthetic import force_rows
from outrider.engine.sampling.verification_rules import RuledRow, apply_rules
from outrider.engine.sampling.verify import padded, verify_rows
from outrider.engine.step import (
    FilledIn,
    RowSlots,
    ScheduledRow,
    Step,
    StepResult,
    fill_in_drafts,
)
from outrider.engine.tree_walk import path_order, per_row, walk_trees
from outrider.params import SamplingParams, VerificationRule
from outrider.types import TokenLogprobs

MAX_EDITED = 2**25
"""Logits that are edited at once, each in a copy of 4 bytes."""


class Pending(Protocol):
    """A step in flight."""

    @property
    def verified(self) -> Tensor | None:
        """`Verified.tokens` for work that is enqueued behind the step; None without a device."""

    @property
    def slots(self) -> RowSlots | None:
        """The slots that the step writes, until the next launch; None if they are not at hand."""

    def wait(self) -> StepResult:
        """Block until the step's one small copy has reached the host. Called once.

        Raises what the forward raises.
        """


class StepRunner(Protocol):
    """Runs steps, of which two at most are in flight."""

    def launch(self, step: Step) -> Pending:
        """Enqueue the step's work and return. May raise what the forward raises.

        The step before may be in flight if `step` knows all that it needs of it.
        """


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A step that could not be launched; its requests fail when its result is waited for."""

    error: Exception

    @property
    def verified(self) -> None:
        return None

    @property
    def slots(self) -> None:
        return None

    def wait(self) -> StepResult:
        raise self.error


class Verified(NamedTuple):
    """The result of a step, for those of its rows that have logits."""

    tokens: Tensor
    """int64 [rows, 1 + width]: per row, drafts accepted, then the target's choices, padded."""
    logprobs: Tensor | None = None  # `drawn_logprobs`, if any row asks for them


FillIn = Callable[[Tensor], None]
"""Replaces placeholders among packed input ids on the device: see `Step.fill_in`."""


class Forwards(Protocol):
    """A faster way to do some of a model's forwards."""

    def logits(self, rows: Sequence[RowSlice], fill_in: FillIn) -> Tensor | None:
        """Return what the model's `forward` returns; None if these rows do not fit."""


class Runner:
    """Runs any step on any device, eagerly. Knows nothing of requests but their sampling."""

    def __init__(
        self, model: Model, *, sample: Sample = sample, forwards: Forwards | None = None
    ) -> None:
        self.model = model
        self._sample = sample
        self._forwards = forwards

    def launch(self, step: Step) -> Pending:
        """Enqueue the step; on a CPU, `wait` does the work."""
        launched = EagerStep(self, step)
        if self.model.device.type != "cpu":
            launched.run()
        return launched

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Return the logits to choose from [num_logits, vocab_size], and prompts' logprobs, if any.

        May raise what the model raises.
        """
        slices = [row.forward_slice for row in step.rows]
        logits = None if self._forwards is None else self._forwards.logits(slices, step.fill_in)
        if logits is None:
            batch = pack(slices, self.model.page_size, self.model.device)
            step.fill_in(batch.input_ids)
            logits = self.model.forward(batch)
        if any(row.num_prompt_logits for row in step.rows):
            scored = [row.scored_tokens for row in step.rows]
            counts = [row.slice.num_logits for row in step.rows]
            return split_prompt_logits(logits, scored, counts)
        return logits, None

    @torch.inference_mode()
    def verify(self, step: Step, logits: Tensor) -> Verified:
        """Sample from `logits`, and compare with the drafts.

        The accepted path of a tree moves to the slots that follow the text.
        """
        rows = [row for row in step.rows if row.slice.num_logits]
        if not rows:
            return Verified(torch.empty((0, 1), dtype=torch.int64))
        drawn = self._draw(logits, rows)
        _force_synthetic(step, rows, drawn, logits.shape[1])
        counts = [row.slice.num_logits for row in rows]
        order = None
        if any(row.slice.parents for row in rows):
            walk = walk_trees(drawn, rows, self.model.page_size)
            self.model.move_slots(walk.source, walk.target)
            tokens, order = walk.tokens, path_order(walk.at, counts)
        else:
            choices = per_row(drawn, counts)
            accepted = verify_rows(_drafts(step, rows, drawn.device), choices)
            tokens = torch.cat((accepted[:, None], choices), dim=1)
        if all(row.seq.request.top_logprobs is None for row in rows):
            return Verified(tokens)
        return Verified(tokens, drawn_logprobs(logits, drawn, _logprobs_of(rows), order))

    def _draw(self, logits: Tensor, rows: list[ScheduledRow]) -> Tensor:
        """Return what the target chooses from each row of logits: int64 [num_logits]."""
        if not any(row.seq.edits_logits for row in rows):
            return self._draw_unedited(logits, rows)
        drawn: list[Tensor] = []
        start, most = 0, MAX_EDITED // logits.shape[1]
        for group in grouped(rows, lambda row: row.slice.num_logits, most):
            end = start + sum(row.slice.num_logits for row in group)
            drawn.append(self._draw_unedited(_edited(logits[start:end], group), group))
            start = end
        return torch.cat(drawn)

    def _draw_unedited(self, logits: Tensor, rows: list[ScheduledRow]) -> Tensor:
        if all(row.seq.request.sampling.greedy for row in rows):
            return logits.argmax(dim=-1)
        params: list[SamplingParams] = []
        positions: list[int] = []  # of the tokens that are drawn
        lanes: list[Lane] = []
        drafted: list[RuledRow] = []
        for row in rows:
            request, count = row.seq.request, row.slice.num_logits
            end = row.slice.start + len(row.slice.token_ids) + 1
            if row.draft and not request.verification_rule.captured:
                drafted.append(_drafted(row, first=len(params)))
            params += [request.sampling] * count
            if row.slice.parents:
                first = end - count
                positions += [first, *(first + 1 + depth for depth in depths(row.slice.parents))]
            else:
                positions += range(end - count, end)
            lanes += [Lane.RECOVER if request.verification_rule.samples else Lane.SHARED] * count
        batch = SamplingBatch.build(params, positions, self.model.device, lanes)
        drawn = self._sample(logits, batch)
        apply_rules(logits, drafted, drawn)
        return drawn


def _drafted(row: ScheduledRow, first: int) -> RuledRow:
    """Return a row whose rule looks at its draft; `first` is its first row of logits."""
    request = row.seq.request
    return RuledRow(
        first=first,
        draft=row.draft,
        draft_probs=row.draft_probs,
        position=row.slice.start + len(row.slice.token_ids) - len(row.draft),
        sampling=request.sampling,
        verification=request.speculation.verification,
    )


def _drafts(step: Step, rows: Sequence[ScheduledRow], device: torch.device) -> Tensor:
    """Return the drafts of some of a step's rows: int64 [rows, most tokens], padded with -1."""
    width = max([len(row.draft) for row in rows])
    drafts = padded([row.draft for row in rows], width, -1).to(device, non_blocking=True)
    if step.device_drafts is not None:
        firsts = [i * width for i in range(len(rows))]
        tokens = FilledIn(step.device_drafts.nodes.tokens, firsts, drafts.view(-1))
        fill_in_drafts(step.device_drafts, rows, tokens)
    return drafts


def _force_synthetic(
    step: Step, rows: Sequence[ScheduledRow], drawn: Tensor, vocab_size: int
) -> None:
    """Let rows whose drafts are accepted at given rates draw what these say, in place."""
    firsts = accumulate((row.slice.num_logits for row in rows), initial=0)
    forced = [
        (row, first)
        for row, first in zip(rows, firsts, strict=False)
        if row.draft and row.seq.request.verification_rule is VerificationRule.SYNTHETIC
    ]
    if forced:
        drafts = _drafts(step, [row for row, _ in forced], drawn.device)
        force_rows(drawn, [_drafted(*each) for each in forced], drafts, vocab_size)


def _edited(logits: Tensor, rows: list[ScheduledRow]) -> Tensor:
    """Return a float32 copy of the rows' logits with all edits applied."""
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


class EagerStep:
    """A step on the device's current stream, which runs once it is waited for at the latest.

    Its trees are read from the device at once.
    """

    slots: RowSlots | None = None

    def __init__(self, runner: Runner, step: Step) -> None:
        self._runner = runner
        self._step = step.with_trees_read()
        self._events = make_events(runner.model.device, 3)
        self.verified: Tensor | None = None  # until it has run

    def wait(self) -> StepResult:
        if self.verified is None:
            self.run()
        forward_s, verify_s = elapsed_seconds(self._events)
        step, (tokens, logprobs, prompts) = self._step, self._on_host
        assert tokens is not None
        with_logits = iter(tokens.tolist())
        choices: list[Sequence[int]] = []
        accepted: list[int] = []
        for row in step.rows:
            count, *chosen = next(with_logits) if row.slice.num_logits else (0,)
            choices.append(chosen)
            accepted.append(count)
        of_prompts: Sequence[Sequence[Sequence[float]]] = ()
        if prompts is not None:
            counts = (row.num_prompt_logits for row in step.rows)
            of_prompts = split_rows(prompts.tolist(), counts)
        by_row = to_logprobs(step, logprobs, accepted)
        return StepResult(choices, accepted, forward_s, verify_s, by_row, of_prompts)

    def run(self) -> None:
        """Enqueue the work."""
        began, forwarded, done = self._events
        began.record()
        logits, prompts = self._runner.forward(self._step)
        forwarded.record()
        self.verified, logprobs = self._runner.verify(self._step, logits)
        self._on_host = [
            None if each is None else each.to("cpu", non_blocking=True)  # pinned
            for each in (self.verified, logprobs, prompts)
        ]
        done.record()


def to_logprobs(
    step: Step, logprobs: Tensor | None, accepted: Sequence[int]
) -> Sequence[tuple[TokenLogprobs, ...]]:
    """Build `StepResult.logprobs` from `Verified.logprobs` on the host."""
    if logprobs is None:
        return ()
    return to_token_logprobs(logprobs.tolist(), _logprobs_of(step.rows), [n + 1 for n in accepted])


def _logprobs_of(rows: Iterable[ScheduledRow]) -> list[RowLogprobs]:
    return [(row.slice.num_logits, row.seq.request.top_logprobs) for row in rows]
