"""Times what the host does between two steps, while nothing runs on the device.

    python -m benchmarks.host_time [--rows 1 8 32 64 128] [--steps 300] [--json FILE]

No model runs: results come at once, and the engine's clock is put forward by the time a plausible
step would take, so that the policy decides as it would. A step is packed as a recorded one is; what
CUDA takes to enqueue it comes on top. Half of a row's K draft tokens are accepted:

- none: without speculation.
- chain: before each step every row gets a block that was drafted ahead.
- tree: the same, as a tree that covers every outcome of the round (two guesses for the next token).
- demand: every row waits for its draft. What the step before brought is told within the gap, and
  the blocks come in two messages, so rows are scheduled three times.

Blocks are posted as the engine's thread posts them, in the gap. Medians of the thread's CPU time,
so that a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.config import EngineConfig
from outrider.draft_tree import DraftTree
from outrider.engine.batch import PackedBatch
from outrider.engine.engine import Engine
from outrider.engine.graphs.capture import Work
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.decode_inputs import Bucket
from outrider.engine.runner import StepRunner
from outrider.engine.sampling.verify import choose_and_verify
from outrider.engine.step import Step, StepResult
from outrider.params import SamplingParams, StopParams, TokenIds
from outrider.types import Request

VOCAB_SIZE = 128_256
PAGE_SIZE = 64
PROMPT_LEN = 512
K = 4
MAX_MODEL_LEN = 8192
CHOSEN = (1, 2, 3, 4, 5)  # by the target, in every round
DRAFT = (1, 2, 9, 9)  # two of them are right
DELAY_S = 0.002  # of drafts on demand
WARM_UP_STEPS = 30
SPECULATIONS = ("none", "chain", "tree", "demand")


@dataclass(frozen=True, slots=True)
class HostTime:
    """Medians over steps, CPU milliseconds."""

    rows: int
    speculation: str
    gap_ms: float  # all of it: from a result to the launch of the next step
    gap_p90_ms: float
    commit_ms: float
    post_ms: float  # taking in the blocks
    schedule_ms: float
    pack_ms: float
    tell_ms: float  # making events of the step before; in the gap only where drafts are waited for


class Gap(NamedTuple):
    """What `HostTime` says of one step, CPU seconds."""

    gap: float
    commit: float
    post: float
    schedule: float
    pack: float
    tell: float


class NoModel:
    """A model's sizes, without the model."""

    vocab_size = VOCAB_SIZE
    page_size = PAGE_SIZE
    max_model_len = MAX_MODEL_LEN
    dtype = torch.bfloat16
    device = torch.device("cpu")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.scratch_page = num_pages

    def forward(self, batch: PackedBatch) -> Tensor:
        raise NotImplementedError

    def logits(self, batch: PackedBatch, out: Tensor) -> Tensor:
        raise NotImplementedError

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        raise NotImplementedError


class Instant:
    """Packs steps by another runner; results are there at once, by its clock after a while."""

    def __init__(self, inner: StepRunner) -> None:
        self.lead_s = 0.0
        self.result_at = 0.0  # CPU seconds
        self.launch_began = 0.0
        self.launched_at = 0.0
        self._inner = inner

    def clock(self) -> float:
        return time.thread_time() + self.lead_s

    def takes_device_drafts(self, num_rows: int, num_drafted: int) -> bool:  # noqa: ARG002
        return False

    def launch(self, step: Step) -> _Result:
        self.launch_began = time.thread_time()
        self._inner.launch(step)
        self.launched_at = time.thread_time()
        return _Result(self, step)


@dataclass(frozen=True, slots=True)
class _Result:
    runner: Instant
    step: Step

    verified = None

    def wait(self) -> StepResult:
        seconds = 0.004 + 2e-6 * self.step.num_tokens
        self.runner.lead_s += seconds
        choices = [CHOSEN if row.slice.num_logits else () for row in self.step.rows]
        accepted = [min(2, len(row.draft)) for row in self.step.rows]
        self.runner.result_at = time.thread_time()
        return StepResult(choices, accepted, seconds)


def _record(work: Work) -> Work:  # noqa: ARG001
    """Record nothing, which takes no time to repeat."""
    return lambda: None


def block(base_len: int, speculation: str) -> DraftTree:
    """What a proposer guesses after `base_len`, or ahead: beyond its draft of the round before.

    On the outcome that comes true, DRAFT follows.
    """
    if speculation == "demand":
        return DraftTree.chain(base_len, DRAFT)
    if speculation == "chain":
        return DraftTree.chain(base_len, (*CHOSEN[:3], *DRAFT))
    tokens, parents = list(DRAFT), list(range(-1, K - 1))
    for accepted in range(K + 1):
        for guess in (CHOSEN[accepted], 77):
            tokens += (guess, *DRAFT)
            parents += (accepted - 1, *range(len(parents), len(parents) + K))
    return DraftTree(base_len, tuple(tokens), tuple(parents))


class HostSteps:
    """The engine's side of steps of `rows` rows."""

    def __init__(self, rows: int, speculation: str) -> None:
        num_pages = rows * MAX_MODEL_LEN // PAGE_SIZE
        config = EngineConfig(
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=8192,
            num_speculative_tokens=K,
        )
        model = NoModel(num_pages)
        buckets = [Bucket(query_len, rows) for query_len in (1, 1 + K)]
        self._runner = Instant(
            DecodeGraphs(model, buckets, capture=_record, choose_and_verify=choose_and_verify)
        )
        self._engine = Engine(model, config, runner=self._runner, clock=self._runner.clock)
        self._speculation = speculation
        self._lengths = dict.fromkeys(range(rows), PROMPT_LEN)  # as far as told
        self._late = False  # drafts were asked for, and the step did not wait for them
        for i in range(rows):
            prompt: TokenIds = (i,) * PROMPT_LEN
            stop = StopParams(max_tokens=MAX_MODEL_LEN)
            self._engine.submit(Request(i, prompt, SamplingParams(temperature=0.0), stop))
            if speculation != "none":
                ahead = speculation != "demand"
                self._engine.set_drafting(i, "proposer", K, runs_ahead=ahead)
        assert self._engine.launch()

    def next(self) -> Gap | None:
        """From the result of the step in flight to the next launch; None if it went otherwise.

        That is where rows wait that should not, or the other way round.
        """
        engine, runner, waiting = self._engine, self._runner, self._speculation == "demand"
        assert engine.collect()
        commit_s = time.thread_time() - runner.result_at
        session_ids = list(self._lengths)
        post_s = tell_s = 0.0
        if self._speculation in ("chain", "tree") or self._late:
            post_s = self._post(session_ids)
        schedule_s = self._launch()
        as_meant, self._late = self._waits == waiting, waiting and not self._waits
        if waiting and self._waits:
            tell_s = self._tell()
            runner.lead_s += DELAY_S
            post_s += self._post(session_ids[::2])
            schedule_s += self._launch()
            as_meant = self._waits or len(session_ids) == 1
            post_s += self._post(session_ids[1::2])
            if self._waits:
                schedule_s += self._launch()
        if self._waits:  # for the first drafts
            as_meant = False
            runner.lead_s += engine.wake_at - runner.clock()
            assert engine.launch()
        told_s = time.thread_time() - runner.launched_at
        told_s += self._tell()
        if not as_meant:
            return None
        pack_s = runner.launched_at - runner.launch_began
        gap_s = commit_s + post_s + schedule_s + pack_s + tell_s
        return Gap(gap_s, commit_s, post_s, schedule_s, pack_s, tell_s or told_s)

    @property
    def _waits(self) -> bool:
        """No step was launched since the last result."""
        return self._runner.launched_at < self._runner.result_at

    def _launch(self) -> float:
        """Seconds until a step is handed to the runner, or no row is found to be ready."""
        began = time.thread_time()
        launched = self._engine.launch()
        return (self._runner.launch_began if launched else time.thread_time()) - began

    def _post(self, session_ids: Sequence[int]) -> float:
        blocks = [(i, block(self._lengths[i], self._speculation)) for i in session_ids]
        arrived_at = self._runner.clock()
        began = time.thread_time()
        for session_id, tree in blocks:
            self._engine.post_block(session_id, tree, "proposer", 1000, arrived_at)
        return time.thread_time() - began

    def _tell(self) -> float:
        began = time.thread_time()
        events = self._engine.take_events()
        seconds = time.thread_time() - began
        for commit in events.commits if events is not None else ():
            assert commit.finish_reason is None
            self._lengths[commit.session_id] = commit.base_len + len(commit.token_ids)
        return seconds


def measure(rows: int, speculation: str, steps: int) -> HostTime:
    """Medians of `steps` steps."""
    host = HostSteps(rows, speculation)
    gaps: list[Gap] = []
    while len(gaps) < steps + WARM_UP_STEPS:
        gap = host.next()
        if gap is not None:
            gaps.append(gap)
    columns = list(zip(*gaps[WARM_UP_STEPS:], strict=True))
    p90 = statistics.quantiles(columns[0], n=10)[-1]
    medians = [statistics.median(column) * 1e3 for column in columns]
    return HostTime(rows, speculation, medians[0], p90 * 1e3, *medians[1:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a copy to a device is no work of the host's
    names = ("gap", "p90", "commit", "post", "schedule", "pack", "tell")
    print(f"{'rows':>5} {'drafts':>7} " + " ".join(f"{name:>8}" for name in names))
    results = []
    for rows in args.rows:
        for speculation in SPECULATIONS:
            times = asdict(measure(rows, speculation, args.steps))
            results.append(times)
            parts = [times[f"{name}_ms"] for name in ("gap", "gap_p90", *names[2:])]
            print(f"{rows:5} {speculation:>7} " + " ".join(f"{part:8.3f}" for part in parts))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
