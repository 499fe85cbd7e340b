"""Captured decode and verification steps: a copy in, one launch, a copy out.

A step whose rows have all caught up (each of their tokens gets logits) runs in the smallest
captured bucket that holds it. Any other step runs eagerly, with its forward in a prefill graph
where one fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batch import PackedBatch
from outrider.engine.events import Event, elapsed_seconds, make_events
from outrider.engine.graphs.buckets import CapturedBuckets
from outrider.engine.graphs.capture import CapturableModel, Capture, Work, replay_seconds
from outrider.engine.graphs.decode_buckets import Bucket
from outrider.engine.graphs.decode_inputs import DecodeInputs
from outrider.engine.graphs.staging import PageLayout
from outrider.engine.graphs.tree_inputs import BY_TORCH, TreeWork
from outrider.engine.runner import Forwards, Pending, Runner, to_logprobs
from outrider.engine.sampling.sample import Sample, sample
from outrider.engine.sampling.verify import ChooseAndVerify, VerifyBatch
from outrider.engine.step import RowSlots, Step, StepResult
from outrider.engine.tree_mask import MAX_TREE_NODES


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A bucket's forward, sampling and verification."""

    inputs: tuple[PackedBatch, VerifyBatch]  # kept, because the graph reads their tensors
    verified: Tensor  # int32 [rows, 1 + query_len]: per row, drafts accepted and then choices
    work: Work
    walk: Work | None  # along the trees, in `verified`; only after captured sampling


class _Place(NamedTuple):
    """Where a step in flight leaves its outputs and times on the host."""

    outputs: Tensor  # int32, flat
    array: NDArray[np.int32]  # the same
    events: Sequence[Event]  # start of a step, end of its captured part, end


class DecodeGraphs:
    """A `StepRunner` that captures every bucket when it is built.

    Logits and outputs have one place for all buckets. On the host outputs have two, since two steps
    may be in flight.
    """

    def __init__(
        self,
        model: CapturableModel,
        buckets: Sequence[Bucket],
        *,
        capture: Capture,
        choose_and_verify: ChooseAndVerify,
        sample: Sample = sample,
        trees: TreeWork = BY_TORCH,
        forwards: Forwards | None = None,
        on_captured: Callable[[], None] = lambda: None,
    ) -> None:
        tokens = max(bucket.tokens for bucket in buckets)
        num_outputs = max(bucket.rows * (1 + bucket.query_len) for bucket in buckets)
        device, on_cuda = model.device, model.device.type == "cuda"
        self._model = model
        self._runner = Runner(model, sample=sample, forwards=forwards)
        self._choose_and_verify = choose_and_verify
        self._trees = trees
        self._layout = PageLayout(model.max_model_len, model.page_size, model.scratch_page, device)
        self._inputs = DecodeInputs(buckets, self._layout)
        self._logits = torch.empty(tokens, model.vocab_size, dtype=model.dtype, device=device)
        self._verified = torch.empty(num_outputs, dtype=torch.int32, device=device)
        self._places = []
        for _ in range(2):
            outputs = torch.empty(num_outputs, dtype=torch.int32, pin_memory=on_cuda)
            self._places.append(_Place(outputs, outputs.numpy(), make_events(device, 3)))

        def captured(bucket: Bucket) -> _CapturedStep:
            step = self._capture(bucket, capture)
            on_captured()
            return step

        self._buckets = CapturedBuckets(buckets, captured, lambda b: b.cost)

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Enqueue the step. The one before the last must have been waited for."""
        bucket = self._fit(step)
        if bucket is None:
            return self._runner.launch(step)
        captured = self._buckets[bucket]
        eager_sampling = self._inputs.fill(step, bucket)
        known = step.with_trees_read() if eager_sampling else step
        self._places.reverse()
        place = self._places[0]
        place.events[0].record()
        self._inputs.send(bucket)
        if step.device_drafts is not None:
            self._inputs.take_device_drafts(step.device_drafts, step.rows, bucket)
        if step.drawn is not None:
            self._inputs.take_drawn(step.drawn, bucket)
        captured.work()
        if captured.walk is not None and not eager_sampling:
            captured.walk()
        place.events[1].record()
        verified, logprobs = captured.verified, None
        if eager_sampling:
            verified, logprobs = self._runner.verify(known, self._real_logits(step, bucket))
        number = verified.numel()
        place.outputs[:number].view(verified.shape).copy_(verified, non_blocking=True)
        on_host = place.array[:number].reshape(verified.shape)
        if logprobs is not None:
            logprobs = logprobs.to("cpu", non_blocking=True)  # pinned
        place.events[2].record()
        slots = RowSlots(captured.inputs[0].slot_mapping, self._inputs.row_starts(bucket))
        return _InFlight(step, verified, on_host, logprobs, place.events, slots)

    def trial_times(self) -> list[tuple[int, int, float]]:
        """Return (rows, tokens, seconds) of every bucket over no context, as a first estimate."""
        times = []
        for bucket in self._buckets:
            captured = self._buckets[bucket]
            self._inputs.fill(Step((), 0), bucket)
            self._inputs.send(bucket)
            works = [work for work in (captured.work, captured.walk) if work is not None]
            seconds = replay_seconds(*works, device=self._model.device)
            times.append((bucket.rows, bucket.tokens, seconds))
        return times

    def _fit(self, step: Step) -> Bucket | None:
        """Return the smallest bucket for a step, or None."""
        if step.has_prompts:
            return None
        counts = [row.slice.num_logits for row in step.others]
        longest, rows = max(counts, default=1), step.num_rows
        slices = [row.slice for row in step.others if row.slice.parents]
        if not self._layout.holds(slices):
            return None
        trees = bool(slices) or step.device_trees is not None
        if trees and longest > 1 + MAX_TREE_NODES:
            return None  # beside trees a chain is one, too
        return self._buckets.find(
            lambda b: (
                b.query_len >= longest
                and b.rows >= rows
                and b.tokens >= step.num_tokens
                and b.trees == trees
            )
        )

    def _capture(self, bucket: Bucket, capture: Capture) -> _CapturedStep:
        self._inputs.fill(Step((), 0), bucket)
        self._inputs.send(bucket)
        batch, verify_batch = self._inputs.batch(bucket), self._inputs.verify_batch(bucket)
        parents = self._inputs.parents(bucket) if bucket.trees else None
        shape = (bucket.rows, 1 + bucket.query_len)
        verified = self._verified[: math.prod(shape)].view(shape)

        @torch.inference_mode()
        def work() -> None:
            if parents is not None and batch.trees is not None:
                placed = (batch.trees, batch.cu_seqlens_q, batch.positions)
                self._trees.place_nodes(parents, *placed, self._model.max_model_len - 1)
            logits = self._model.logits(batch, self._logits[: bucket.tokens])
            self._choose_and_verify(logits, verify_batch, verified)

        inputs = (batch, verify_batch)
        captured = capture(work)
        if parents is None:
            return _CapturedStep(inputs, verified, captured, None)
        scratch_slot = self._model.scratch_page * self._model.page_size

        @torch.inference_mode()
        def walk_trees() -> None:
            walked = (parents, verify_batch, batch.slot_mapping, scratch_slot, verified)
            self._model.move_slots(*self._trees.walk_nodes(*walked))

        return _CapturedStep(inputs, verified, captured, capture(walk_trees))

    def _real_logits(self, step: Step, bucket: Bucket) -> Tensor:
        """Return the logits of all but padding tokens, as an eager forward does."""
        counts = [row.slice.num_logits for row in step.rows]
        if sum(counts) == bucket.tokens:
            return self._logits[: bucket.tokens]
        starts = self._inputs.row_starts(bucket)
        index = [start + i for start, n in zip(starts, counts, strict=False) for i in range(n)]
        return self._logits[torch.tensor(index).to(self._logits.device, non_blocking=True)]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A captured step that was launched."""

    step: Step
    verified: Tensor
    on_host: NDArray[np.int32]  # [at least rows, 1 + query_len], once the end is reached
    logprobs: Tensor | None  # as `Verified.logprobs`, then
    events: Sequence[Event]
    slots: RowSlots

    def wait(self) -> StepResult:
        forward_s, verify_s = elapsed_seconds(self.events)
        verified = self.on_host[: self.step.num_rows]
        accepted = verified[:, 0].tolist()
        logprobs = to_logprobs(self.step, self.logprobs, accepted)
        choices = [*zip(*verified[:, 1:].T.tolist(), strict=True)]
        return StepResult(choices, accepted, forward_s, verify_s, logprobs)
