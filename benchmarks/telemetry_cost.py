"""What metrics and traces cost: the embedded pair with neither, with metrics, with both.

    python -m benchmarks.telemetry_cost            # under four minutes on two cores

One stack of processes, whose telemetry is switched between turns (switched.py): two stacks of the
same kind differ by more than what is measured. `muted` counts nothing and traces nothing (the
engine still adds up a step's sums), `metrics` is what runs by default and is scraped every second,
`traces` also sends the spans of every request, which is OpenTelemetry's default sampling, to a
collector in this process. Each turn decodes the same prompts in all three modes, in an order that
changes, and a ratio is the median of the turns' ratios, with the range of the middle half of turns
and a 90% interval of the median (bootstrap). CPU is the services' own time per token: on a machine
with other work it is the steadier of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from prometheus_client import CollectorRegistry

from benchmarks import prompts
from benchmarks.otlp import collecting
from benchmarks.outrider_stack import Stack, StackConfig
from benchmarks.processes import Child, ProcessError, stopping
from benchmarks.switched import MODES
from outrider.counts import StepCounts
from outrider.models.resolve import resolve_model
from outrider.types import StepTimings
from scorer_service.metrics import ScorerMetrics

_ROOT = str(Path(__file__).parents[1])  # where the services' wrapper is found
_WARM_UP_TURNS = 1
_SCRAPE_S = 1.0
_SWITCH_S = 0.05  # until the switch has happened


@dataclass
class Arm:
    """One mode of the services' telemetry."""

    mode: str
    stack: Stack
    children: list[Child]
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)  # by requests at once
    cpu_s_per_token: dict[int, list[float]] = field(default_factory=dict)

    def turn(self, group: Sequence[tuple[int, ...]], max_tokens: int, at_once: int) -> None:
        """Decodes a group of prompts, `at_once` of them at a time."""
        for child in self.children:
            os.kill(child.pid, MODES[self.mode])
        time.sleep(_SWITCH_S)
        before = sum(child.cpu_seconds() for child in self.children)
        done, seconds = self.stack.generate(
            group, max_tokens, at_once, method="draft_model", through_gateway=True, timeout_s=120
        )
        used = sum(child.cpu_seconds() for child in self.children) - before
        tokens = sum(len(completion.token_ids) for completion in done)
        self.tokens_per_s.setdefault(at_once, []).append(tokens / seconds)
        self.cpu_s_per_token.setdefault(at_once, []).append(used / tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 if a service failed."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--seconds", type=float, default=180.0, help="of measuring")
    p.add_argument("--max-tokens", type=int, default=64, help="of a completion")
    p.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="requests at a time")
    args = p.parse_args(argv)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            collecting() as (collector, endpoint),
            running(Path(folder), endpoint) as arms,
            scraping(arms["muted"].stack.metrics_url),
        ):
            measure(arms, args.seconds, args.max_tokens, args.at_once)
    except ProcessError as error:
        print(f"telemetry_cost: {error}", file=sys.stderr)
        return 1
    report(arms, args.at_once, collector.spans)
    return 0


@contextlib.contextmanager
def running(folder: Path, endpoint: str) -> Iterator[dict[str, Arm]]:
    """A stack that is up and has its proposer, in all its modes."""
    with contextlib.ExitStack() as cleanup:
        children = cleanup.enter_context(stopping([]))
        config = StackConfig(
            model="embedded",
            draft_model="embedded",
            dtype="float32",
            num_speculative_tokens=4,
            scorer_threads=2,
            proposer_threads=1,
            start_timeout_s=120.0,
            methods=("draft_model",),
            wrapper=("benchmarks.switched",),
            env=(("PYTHONPATH", _ROOT), ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)),
        )
        stack = Stack(config, children, folder)
        cleanup.callback(stack.close)
        stack.require_proposers()
        yield {mode: Arm(mode, stack, children) for mode in MODES}


@contextlib.contextmanager
def scraping(url: str) -> Iterator[None]:
    """Reads /metrics every second meanwhile, as Prometheus would; in all modes."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(_SCRAPE_S):
            request = urllib.request.Request(
                url, headers={"Accept": "application/openmetrics-text;version=1.0.0"}
            )
            urllib.request.urlopen(request, timeout=10).read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10)


def measure(arms: dict[str, Arm], seconds: float, max_tokens: int, at_once: Sequence[int]) -> None:
    """Takes turns until the time is over, then forgets the first ones."""
    file = Path(str(resources.files("outrider.models") / "data/heldout_prompts.jsonl"))
    known = prompts.load(file, resolve_model("embedded", "target"), count=48, max_prompt_tokens=64)
    rng, deadline, turn = random.Random(0), 0.0, 0
    while turn <= _WARM_UP_TURNS or time.monotonic() < deadline:
        if turn == _WARM_UP_TURNS:
            deadline = time.monotonic() + seconds
        for rows in at_once:
            group = known.group(turn, max(2, rows))
            for name in rng.sample(list(MODES), len(MODES)):
                arms[name].turn(group, max_tokens, rows)
        turn += 1
    for arm in arms.values():
        for values in (*arm.tokens_per_s.values(), *arm.cpu_s_per_token.values()):
            del values[:_WARM_UP_TURNS]


def step_cost_us(rows: int) -> float:
    """CPU time of the event loop to count one step of so many rows; the best of many tries."""
    metrics = ScorerMetrics(CollectorRegistry(), "default")
    metrics.attached("proposer-0", "default")
    timings = StepTimings(0.1, 20.0, 1.0, 0.2, 0.1, rows, 5 * rows, 0.3)
    counts = StepCounts(
        rounds=Counter((4, i % 5) for i in range(rows)),
        drafted_by=Counter({"proposer-0": 4 * rows}),
        accepted_by=Counter({"proposer-0": 2 * rows}),
        output_tokens=3 * rows,
        fates=Counter({("proposer-0", "hit"): rows}),
        plain_s=0.01,
    )
    best = math.inf
    for _ in range(50):
        began = time.thread_time()
        for _ in range(200):
            metrics.observe_step(timings, counts)
        best = min(best, (time.thread_time() - began) / 200)
    return best * 1e6


def report(arms: dict[str, Arm], at_once: Sequence[int], spans: int) -> None:
    """A table of costs against `muted`, in percent."""
    cost = ", ".join(f"{step_cost_us(rows):.0f} us with {rows} rows" for rows in (1, 8, 64))
    print(f"counting a step takes the event loop {cost}; {spans} spans were collected\n")
    print("| at once | turns | arm | tokens/s | tokens/s lost, % | CPU per token more, % |")
    print("|---|---|---|---|---|---|")
    for rows in at_once:
        base = arms["muted"]
        for name, arm in arms.items():
            speed = statistics.median(arm.tokens_per_s[rows])
            lost = [
                100 * (1 - a / b)
                for a, b in zip(arm.tokens_per_s[rows], base.tokens_per_s[rows], strict=True)
            ]
            more = [
                100 * (a / b - 1)
                for a, b in zip(arm.cpu_s_per_token[rows], base.cpu_s_per_token[rows], strict=True)
            ]
            cells = ("", "") if arm is base else (interval(lost), interval(more))
            print(f"| {rows} | {len(lost)} | {name} | {speed:.1f} | {cells[0]} | {cells[1]} |")


def interval(values: Sequence[float]) -> str:
    """Median, the 90% interval of the median, and the middle half of the values."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    quarter = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return (
        f"{statistics.median(values):+.1f} [{medians[100]:+.1f}, {medians[1899]:+.1f}] "
        f"(turns {quarter[0]:+.1f} to {quarter[2]:+.1f})"
    )


if __name__ == "__main__":
    sys.exit(main())
