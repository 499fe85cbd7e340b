"""Times what the host does between two steps, while nothing runs on the device.

    python -m benchmarks.host_time [--rows 1 8 32 64 128] [--steps 300] [--json FILE]

No model runs: results come at once, and the engine's clock is put forward by the time a plausible
step would take, so that the policy decides as it would. Before each step every row gets a block
that was drafted ahead, and half of its K draft tokens are accepted: as a chain, or as a tree that
covers every outcome of the round (two guesses for the next token each); "none" is without
speculation. Blocks are posted as the engine's thread posts them, in the gap. Medians of
the thread's CPU time, so that a busy machine disturbs little; what a runner does to pack and
enqueue a step comes on top.
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

import torch

from outrider.config import EngineConfig
from outrider.draft_tree import DraftTree
from outrider.engine.batch import PackedBatch
from outrider.engine.engine import Engine
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
WARM_UP_STEPS = 30
SPECULATIONS = ("none", "chain", "tree")


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


class NoModel:
    """A model's sizes, without the model."""

    vocab_size = VOCAB_SIZE
    page_size = PAGE_SIZE
    max_model_len = MAX_MODEL_LEN
    device = torch.device("cpu")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        raise NotImplementedError

    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        raise NotImplementedError


class Instant:
    """A runner whose results are there at once; by its clock they took a while."""

    def __init__(self) -> None:
        self.lead_s = 0.0

    def clock(self) -> float:
        return time.thread_time() + self.lead_s

    def launch(self, step: Step) -> _Result:
        return _Result(self, step)


@dataclass(frozen=True, slots=True)
class _Result:
    runner: Instant
    step: Step

    def wait(self) -> StepResult:
        seconds = 0.004 + 2e-6 * self.step.num_tokens
        self.runner.lead_s += seconds
        choices = [CHOSEN if row.slice.num_logits else () for row in self.step.rows]
        accepted = [min(2, len(row.draft)) for row in self.step.rows]
        return StepResult(choices, accepted, seconds)


def ahead(base_len: int, speculation: str) -> DraftTree:
    """What a proposer guesses beyond its last draft, which is still being verified.

    On the outcome that comes true, DRAFT follows.
    """
    if speculation == "chain":
        return DraftTree.chain(base_len, (*CHOSEN[:3], *DRAFT))
    tokens, parents = list(DRAFT), list(range(-1, K - 1))
    for accepted in range(K + 1):
        for guess in (CHOSEN[accepted], 77):
            tokens += (guess, *DRAFT)
            parents += (accepted - 1, *range(len(parents), len(parents) + K))
    return DraftTree(base_len, tuple(tokens), tuple(parents))


def measure(rows: int, speculation: str, steps: int) -> HostTime:
    """Runs the engine's side of `steps` steps of `rows` rows."""
    num_pages = rows * MAX_MODEL_LEN // PAGE_SIZE
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=8192,
        num_speculative_tokens=K,
    )
    runner = Instant()
    engine = Engine(NoModel(num_pages), config, runner=runner, clock=runner.clock)
    for i in range(rows):
        prompt: TokenIds = (i,) * PROMPT_LEN
        stop = StopParams(max_tokens=MAX_MODEL_LEN)
        engine.submit(Request(i, prompt, SamplingParams(temperature=0.0), stop))
        if speculation != "none":
            engine.set_drafting(i, "proposer", K, runs_ahead=True)
    lengths = dict.fromkeys(range(rows), PROMPT_LEN)
    gaps: list[float] = []
    commits: list[float] = []
    posts: list[float] = []
    schedules: list[float] = []
    assert engine.launch()
    while len(gaps) < steps + WARM_UP_STEPS:
        blocks = [
            (session_id, ahead(length, speculation))
            for session_id, length in lengths.items()
            if speculation != "none" and length > PROMPT_LEN
        ]
        assert engine.collect()
        posting = time.thread_time()
        arrived_at = runner.clock()
        for session_id, block in blocks:
            engine.post_block(session_id, block, "proposer", 1000, arrived_at)
        posted = time.thread_time()
        if not engine.launch():  # the first drafts are waited for
            runner.lead_s += engine.wake_at - runner.clock()
            assert engine.launch()
        events = engine.take_events()
        assert events is not None
        assert events.timings is not None
        for commit in events.commits:
            assert commit.finish_reason is None
            lengths[commit.session_id] = commit.base_len + len(commit.token_ids)
        if events.timings.gap_ms is not None and min(lengths.values()) > PROMPT_LEN:
            gaps.append(events.timings.gap_ms)
            commits.append(events.timings.commit_ms)
            posts.append((posted - posting) * 1e3)
            schedules.append(events.timings.schedule_ms)
    parts = (statistics.median(part[WARM_UP_STEPS:]) for part in (commits, posts, schedules))
    gaps = gaps[WARM_UP_STEPS:]
    p90 = statistics.quantiles(gaps, n=10)[-1]
    return HostTime(rows, speculation, statistics.median(gaps), p90, *parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    print(
        f"{'rows':>5} {'drafts':>7} {'gap':>8} {'p90':>8} {'commit':>8} {'post':>8} {'schedule':>8}"
    )
    results = []
    for rows in args.rows:
        for speculation in SPECULATIONS:
            t = measure(rows, speculation, args.steps)
            results.append(asdict(t))
            parts = (t.gap_ms, t.gap_p90_ms, t.commit_ms, t.post_ms, t.schedule_ms)
            print(f"{rows:5} {speculation:>7} " + " ".join(f"{part:8.3f}" for part in parts))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
