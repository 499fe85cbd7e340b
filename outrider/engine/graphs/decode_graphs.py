"""Decode and verification steps as recorded work: a copy in, one launch, a copy out.

Steps that are nothing but rows that have caught up (each token of theirs gets logits) run in the
smallest recorded bucket that holds them. All others run eagerly, on the same model, but for their
forward if `forwards` hold it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.batch import Model, PackedBatch
from outrider.engine.graphs.capture import Record, Work
from outrider.engine.graphs.decode_inputs import Bucket, DecodeInputs, DecodeSizes
from outrider.engine.runner import Forwards, Pending, Runner, to_logprobs
from outrider.engine.sampling.coupled import Sample, sample
from outrider.engine.sampling.tree_walk import walk
from outrider.engine.sampling.verify import ChooseAndVerify, VerifyBatch
from outrider.engine.step import Step, StepResult


class CapturableModel(Model, Protocol):
    """A model whose forward can be recorded."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def scratch_page(self) -> int:
        """A page that no sequence ever gets."""
        ...

    def logits(self, batch: PackedBatch, out: Tensor) -> Tensor:
        """What `forward` returns, in `out`, which has the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One bucket: its forward, and then a draw and the verification by it."""

    inputs: tuple[PackedBatch, VerifyBatch]  # kept, because the recorded work reads their tensors
    verified: Tensor  # int32 [rows, 1 + query_len]: per row, drafts accepted and then choices
    on_host: Tensor  # a place for the same
    work: Work
    walk: Work | None  # along the trees, in `verified`; not for draws that are not recorded


class DecodeGraphs:
    """A `StepRunner`. Building it records every bucket, the largest first.

    Logits and outputs have one place for all buckets: one step is in flight at most.
    """

    def __init__(
        self,
        model: CapturableModel,
        buckets: Sequence[Bucket],
        *,
        record: Record,
        choose_and_verify: ChooseAndVerify,
        sample: Sample = sample,
        forwards: Forwards | None = None,
        on_captured: Callable[[], None] = lambda: None,
    ) -> None:
        rows = max(bucket.rows for bucket in buckets)
        query_len = max(bucket.query_len for bucket in buckets)
        tokens = max(bucket.tokens for bucket in buckets)
        self._model = model
        self._runner = Runner(model, sample=sample, forwards=forwards)
        self._choose_and_verify = choose_and_verify
        sizes = DecodeSizes(
            rows,
            query_len,
            model.max_model_len,
            model.page_size,
            model.scratch_page,
            trees=any(bucket.trees for bucket in buckets),
        )
        device = model.device
        self._inputs = DecodeInputs(sizes, device)
        self._logits = torch.empty(tokens, model.vocab_size, dtype=model.dtype, device=device)
        self._verified = torch.empty(tokens + rows, dtype=torch.int32, device=device)
        self._on_host = torch.empty(
            tokens + rows, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._marks: _Marks = _CudaMarks() if device.type == "cuda" else _HostMarks()
        self._buckets = sorted(buckets)
        self._recorded: dict[Bucket, _Recorded] = {}
        largest_first = sorted(buckets, key=lambda bucket: bucket.tokens, reverse=True)
        for bucket in largest_first:
            self._recorded[bucket] = self._record(bucket, record)
            on_captured()

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Enqueues the step. The one before must have been waited for."""
        bucket = self._fit(step)
        if bucket is None:
            return self._runner.launch(step)
        recorded = self._recorded[bucket]
        any_apart = self._inputs.fill(step.rows, bucket)
        self._marks.mark(0)
        self._inputs.copy(bucket)
        if step.device_drafts is not None:
            self._inputs.take_device_drafts(step.device_drafts, step.rows, bucket)
        recorded.work()
        if recorded.walk is not None and not any_apart:
            recorded.walk()
        self._marks.mark(1)
        verified, on_host, logprobs = recorded.verified, recorded.on_host, None
        if any_apart:  # edits, of a size that follows the rows: not recorded
            verified, logprobs = self._runner.verify(step, self._real_logits(step, bucket))
            on_host = self._on_host[: verified.numel()].view(verified.shape)
        on_host.copy_(verified, non_blocking=True)
        if logprobs is not None:
            logprobs = logprobs.to("cpu", non_blocking=True)  # pinned
        self._marks.mark(2)
        return _InFlight(step, verified, on_host, logprobs, self._marks)

    def takes_device_drafts(self, num_rows: int, num_drafted: int) -> bool:
        """Recorded steps read their inputs on the device."""
        return any(
            bucket.query_len > num_drafted and bucket.rows >= num_rows and not bucket.trees
            for bucket in self._buckets
        )

    def trial_times(self, repeats: int = 3) -> list[tuple[int, int, float]]:
        """(rows, tokens, seconds) of every bucket over no context: where a policy can begin."""
        times = []
        for bucket, recorded in self._recorded.items():
            self._inputs.fill((), bucket)
            self._inputs.copy(bucket)
            seconds = []
            for _ in range(repeats):
                self._marks.mark(0)
                recorded.work()
                if recorded.walk is not None:
                    recorded.walk()
                self._marks.mark(1)
                self._marks.mark(2)
                seconds.append(self._marks.wait()[0])
            times.append((bucket.rows, bucket.tokens, min(seconds)))
        return times

    def _fit(self, step: Step) -> Bucket | None:
        """The smallest bucket for a step; None if none fits."""
        lengths = [len(row.slice.token_ids) for row in step.rows]
        if lengths != [row.slice.num_logits for row in step.rows]:
            return None
        longest = max(lengths)
        ends = [
            row.slice.start + len(row.slice.token_ids) for row in step.rows if row.slice.parents
        ]
        if max(ends, default=0) > self._model.max_model_len:
            return None  # nodes lie where a bucket has no slots: see `StaticInputs.fill`
        for bucket in self._buckets:
            fits = bucket.query_len >= longest and bucket.rows >= len(lengths)
            if fits and bucket.trees == bool(ends):
                return bucket
        return None

    def _record(self, bucket: Bucket, record: Record) -> _Recorded:
        self._inputs.fill((), bucket)
        self._inputs.copy(bucket)
        batch, verify_batch = self._inputs.batch(bucket), self._inputs.verify_batch(bucket)
        shape = (bucket.rows, 1 + bucket.query_len)
        verified = self._verified[: math.prod(shape)].view(shape)
        on_host = self._on_host[: math.prod(shape)].view(shape)

        @torch.inference_mode()
        def work() -> None:
            logits = self._model.logits(batch, self._logits[: bucket.tokens])
            self._choose_and_verify(logits, verify_batch, verified)

        inputs = (batch, verify_batch)
        recorded = record(work)
        if not bucket.trees:
            return _Recorded(inputs, verified, on_host, recorded, None)
        parents = self._inputs.parents(bucket)

        @torch.inference_mode()
        def walk_trees() -> None:
            real = torch.arange(bucket.query_len - 1, device=parents.device)
            drafts = torch.where(
                real < verify_batch.draft_lens[:, None], verify_batch.input_ids[:, 1:], -1
            )
            slots = batch.slot_mapping.view(shape[0], -1)[:, 1:]
            choices = verified[:, 1:].long()
            walked = walk(drafts, parents, choices, slots, bucket.query_len - 1)
            verified.copy_(walked.tokens)
            self._model.move_slots(walked.source, walked.target)

        return _Recorded(inputs, verified, on_host, recorded, record(walk_trees))

    def _real_logits(self, step: Step, bucket: Bucket) -> Tensor:
        """The logits of the tokens that are not inert, as an eager forward returns them."""
        counts = [row.slice.num_logits for row in step.rows]
        if min(counts) == bucket.query_len:
            return self._logits[: sum(counts)]
        starts = range(0, bucket.tokens, bucket.query_len)
        index = [start + i for start, n in zip(starts, counts, strict=False) for i in range(n)]
        return self._logits[torch.tensor(index).to(self._logits.device, non_blocking=True)]


class _Marks(Protocol):
    """Three moments of a step: its start, the end of what is recorded of it, its end."""

    def mark(self, moment: int) -> None: ...

    def wait(self) -> tuple[float, float]:
        """Blocks until the end; seconds of what is recorded, and from there to the end."""
        ...


class _CudaMarks:
    """Moments on the current stream."""

    def __init__(self) -> None:
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        ]

    def mark(self, moment: int) -> None:
        self._events[moment].record()

    def wait(self) -> tuple[float, float]:
        start, recorded, end = self._events
        end.synchronize()
        return start.elapsed_time(recorded) * 1e-3, recorded.elapsed_time(end) * 1e-3


class _HostMarks:
    """Moments of a device on which nothing is enqueued."""

    def __init__(self) -> None:
        self._moments = [0.0] * 3

    def mark(self, moment: int) -> None:
        self._moments[moment] = time.perf_counter()

    def wait(self) -> tuple[float, float]:
        start, recorded, end = self._moments
        return recorded - start, end - recorded


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A recorded step that was launched."""

    step: Step
    verified: Tensor
    on_host: Tensor  # int32 [at least rows, 1 + query_len], once the end is reached
    logprobs: Tensor | None  # as `Verified.logprobs`, then
    marks: _Marks

    def wait(self) -> StepResult:
        forward_s, verify_s = self.marks.wait()
        verified = self.on_host[: len(self.step.rows)].numpy()
        accepted = verified[:, 0].tolist()
        logprobs = to_logprobs(self.step, self.logprobs, accepted)
        return StepResult(verified[:, 1:].tolist(), accepted, forward_s, verify_s, logprobs)
