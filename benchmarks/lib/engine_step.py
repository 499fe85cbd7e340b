"""Times of the engine's step: its captured work alone, and with the host's work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.lib.gpu import time_ms
from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.batch import RowSlice, pack
from outrider.engine.engine import Engine
from outrider.engine.graphs.capture import Capture, Work
from outrider.engine.graphs.decode_buckets import Bucket
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.sequence import Sequence as Row
from outrider.engine.step import ScheduledRow, Step
from outrider.params import SamplingParams, StopParams
from outrider.policy.base import FixedPolicy
from outrider.policy.row import Drafting, Offered
from outrider.types import Request

_WARM_UP_STEPS = 10


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of one step."""

    device_ms: float  # the captured work, replayed back to back
    runner_ms: float  # from `launch` to the result on the host
    engine_ms: float | None  # with scheduling and committing
    gap_ms: float | None  # of that, between a result and the next launch


class EngineSteps:
    """Steps of one model, captured for every size that is timed."""

    def __init__(self, model: PagedModel, sizes: Sequence[tuple[int, int]]) -> None:
        self._model = model  # `sizes` are rows and query tokens
        if model.device.type == "cuda":
            from outrider.engine.cuda.sampling import choose_and_verify
            from outrider.engine.graphs.capture import CudaGraphs

            record: Capture = CudaGraphs()
        else:
            from outrider.engine.sampling.verify import choose_and_verify

            record = _eager
        buckets = [Bucket(query_len, rows) for rows, query_len in sizes]
        self._runner = DecodeGraphs(
            model, buckets, capture=record, choose_and_verify=choose_and_verify
        )

    @torch.inference_mode()
    def measure(
        self, rows: int, query_len: int, context: int, *, repeats: int, loop_steps: int
    ) -> StepTimes:
        """Return medians for `rows` rows of `query_len` tokens after `context` cached ones."""
        step = self._step(rows, query_len, context)

        def launch_and_wait() -> None:
            self._runner.launch(step).wait()

        launch_and_wait()  # the inputs are in place
        recorded = self._runner._buckets[Bucket(query_len, rows)]
        device_ms = time_ms(recorded.work, self._model.device, repeats)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            launch_and_wait()
            times.append((time.perf_counter() - began) * 1e3)
        engine_ms = gap_ms = None
        if loop_steps:
            engine_ms, gap_ms = self._loop(rows, query_len - 1, context, loop_steps)
        return StepTimes(device_ms, statistics.median(times), engine_ms, gap_ms)

    @torch.inference_mode()
    def measure_prompt(self, tokens: int, *, repeats: int) -> StepTimes:
        """Return medians of the forward of one prompt, whose kernels Python launches."""
        pages = -(-tokens // self._model.page_size)
        row = RowSlice([1] * tokens, 0, list(range(pages)), 1)
        batch = pack([row], self._model.page_size, self._model.device)
        ms = time_ms(lambda: self._model.logits(batch), self._model.device, repeats)
        return StepTimes(ms, ms, None, None)

    def _step(self, rows: int, query_len: int, context: int) -> Step:
        pages = -(-(context + query_len) // self._model.page_size)
        scheduled = []
        for i in range(rows):
            seq = Row(
                _request(i, 2),
                max_len=self._model.max_model_len,
                stop_ids=frozenset(),
                drafting=Drafting(Offered(query_len - 1)),
                submitted_at=0.0,
            )
            tokens = tuple(range(1, query_len + 1))
            row = RowSlice(tokens, context, list(range(i * pages, (i + 1) * pages)), query_len)
            scheduled.append(ScheduledRow(seq, row, tokens[1:]))
        return Step(tuple(scheduled), rows * query_len)

    def _loop(self, rows: int, k: int, context: int, steps: int) -> tuple[float, float | None]:
        """Time the whole engine on prompts of `context` tokens.

        Drafts are always at hand. They are arbitrary, so most are rejected.
        """
        config = EngineConfig(
            page_size=self._model.page_size,
            num_pages=self._model.num_pages,
            max_num_seqs=rows,
            max_num_batched_tokens=8192,
            max_model_len=self._model.max_model_len,
            num_speculative_tokens=k,
            enable_prefix_caching=False,
        )
        engine = Engine(self._model, config, policy=FixedPolicy(k), runner=self._runner)
        for i in range(rows):
            engine.submit(_request(i, context))
            engine.set_drafting(i, DraftOffer("proposer" if k else None, k))
        draft, parents = tuple(range(1, k + 1)), tuple(range(-1, k - 1))
        times: list[float] = []
        gaps: list[float] = []
        lengths = dict.fromkeys(range(rows), context)
        decoding: set[int] = set()
        while len(times) < steps + _WARM_UP_STEPS:
            all_decode = len(decoding) == rows
            began = time.perf_counter()
            launched = engine.launch()
            events = engine.finalize_step()  # of the step before
            if events is not None:
                if events.failures:
                    raise events.failures[0].error
                decoding.update(commit.session_id for commit in events.commits)
                timings = events.timings
                if all_decode and timings is not None and timings.gap_ms is not None:
                    gaps.append(timings.gap_ms)
            if not launched:
                continue
            # Other threads make blocks while a step runs: here for every number of new tokens.
            blocks = {
                i: [DraftTree(length + n, draft, parents) for n in range(k + 2)]
                for i, length in lengths.items()
                if k
            }
            engine.collect()
            for i in range(rows):
                emitted = len(engine.committed(i) or ()) - lengths[i]
                lengths[i] += emitted
                if k and emitted:
                    engine.post_block(PostedBlock(i, blocks[i][emitted], "proposer", 0))
            if all_decode:
                times.append((time.perf_counter() - began) * 1e3)
        for i in range(rows):
            engine.abort(i)
        gap = statistics.median(gaps[_WARM_UP_STEPS:]) if gaps else None
        return statistics.median(times[_WARM_UP_STEPS:]), gap


def _request(session_id: int, prompt_len: int) -> Request:
    return Request(
        session_id=session_id,
        prompt_token_ids=tuple((7 * j + session_id) % 1000 for j in range(prompt_len)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=100_000, ignore_eos=True),
    )


def _eager(work: Work) -> Work:
    return work
