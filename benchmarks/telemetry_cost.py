"""What metrics and traces cost: the embedded pair with neither, with the default, with every trace.

    python -m benchmarks.telemetry_cost            # under four minutes on two cores

One stack of processes, whose telemetry is switched between turns (switched.py): two stacks of the
same kind differ by more than what is measured. `muted` counts nothing and traces nothing (the
engine still adds up a step's sums). `default` is what the Helm chart sets once it is told of a
collector: metrics, scraped (here every second), and one request in a hundred traced. `all` traces
every request, which is OpenTelemetry's own default; spans go to a collector in this process.

All turns decode the same prompts in the same rounds and steps. One that did not is left out (drafts
may differ in a near tie); if many did not, the program fails. Every other turn is a muted one, and
a turn is compared with the mean of its two muted neighbours, which takes out what changes slowly.
The row `muted` compares muted turns with the muted ones before and after: its interval is what the
method can tell apart, at least. A figure is the median of the turns, with a 90% interval of the
median (bootstrap) and the range of the middle half of turns.

Tokens/s of a turn go up and down by 5% by themselves. The sharp figure is the services' CPU time
beside the models, that is without the engine's thread and the drafting thread, in percent of all
their CPU time: what telemetry does is done there, but for some 5 us in which a drafting cycle
counts itself. It has the sending of all spans of a turn, tokens/s only of those that went off while
it lasted (every 5 s, or 512 at a time); the others are sent at its end.
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
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import prompts
from benchmarks.otlp import collecting
from benchmarks.lib.stack import Job, Stack, StackConfig
from benchmarks.lib.processes import Child, ProcessError, stopping
from benchmarks.lib.program import guarded
from benchmarks.switched import MODES, STEPS
from benchmarks.telemetry_parts import spans_cost_us, step_cost_us
from outrider.models.resolve import resolve_model

_WARM_UP_TURNS = 2
_SAME = 0.7  # of turns at least must do the same work
_NEAR = 0.01  # of drafts may differ
_SCRAPE_S = 1.0
_SWITCH_S = 0.05  # until the switch has happened
_SEND_S = 0.15  # until what was recorded is sent


@dataclass(frozen=True)
class Work:
    """What the services did in a turn."""

    requests: int
    tokens: int
    rounds: float
    drafted: float
    accepted: float
    steps: float

    def like(self, other: Work) -> bool:
        """Whether it took as many steps, of as many tokens but for one in a hundred."""
        counts = ((self.rounds, other.rounds), (self.drafted, other.drafted))
        return (self.tokens, self.steps) == (other.tokens, other.steps) and all(
            math.isclose(a, b, rel_tol=_NEAR) for a, b in counts
        )


@dataclass(frozen=True)
class Turn:
    """One group of prompts in one mode."""

    mode: str
    work: Work
    seconds: float
    cpu_s: float
    beside_s: float  # of it, what the models did not use


@dataclass(frozen=True)
class Bench:
    """A stack that is up, and whether it is scraped at the moment."""

    stack: Stack
    children: Sequence[Child]
    scraped: threading.Event

    def turn(
        self, mode: str, group: Sequence[tuple[int, ...]], max_tokens: int, at_once: int
    ) -> Turn:
        """Decode a group of prompts, `at_once` of them at a time."""
        jobs = [Job(prompt, max_tokens) for prompt in group]
        steps = self._steps()
        self._switch(mode)
        cpu_s, model_s = self._cpu_s(), self._model_s()
        if MODES[mode].counts:
            self.scraped.set()
        done, seconds = self.stack.generate(jobs, at_once, method="draft_model", timeout_s=120)
        self.scraped.clear()
        self._switch("muted")
        time.sleep(_SEND_S)
        cpu_s, model_s = self._cpu_s() - cpu_s, self._model_s() - model_s
        rounds, drafted, accepted = (
            sum(each.stats[name] for each in done) for name in ("rounds", "drafted", "accepted")
        )
        tokens, steps = sum(len(each.token_ids) for each in done), self._steps() - steps
        work = Work(len(done), tokens, rounds, drafted, accepted, steps)
        return Turn(mode, work, seconds, cpu_s, cpu_s - model_s)

    def _switch(self, mode: str) -> None:
        for child in self.children:
            os.kill(child.pid, MODES[mode].signal)
        time.sleep(_SWITCH_S)

    def _cpu_s(self) -> float:
        return sum(child.cpu_seconds() for child in self.children)

    def _model_s(self) -> float:
        return sum(
            child.busiest_thread_seconds()
            for child in self.children
            if not child.name.endswith("gateway")
        )

    def _steps(self) -> float:
        return sum(s.value for s in self.stack.metrics() if s.name.endswith(STEPS))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 2 if a service failed or turns did different work."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--seconds", type=float, default=180.0, help="of measuring")
    p.add_argument("--max-tokens", type=int, default=64, help="of a completion")
    p.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="requests at a time")
    args = p.parse_args(argv)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    with (
        tempfile.TemporaryDirectory() as folder,
        collecting() as (collector, endpoint),
        running(Path(folder), endpoint) as bench,
    ):
        seconds = args.seconds / len(args.at_once)
        turns = {n: measure(bench, seconds, args.max_tokens, n) for n in args.at_once}
    report({n: pairs(taken) for n, taken in turns.items()})
    print(f"\n{collector.spans} spans of {len(collector.trace_ids)} traces were collected")
    return 0


@contextlib.contextmanager
def running(folder: Path, endpoint: str) -> Iterator[Bench]:
    """A stack that is up and has its proposer."""
    with contextlib.ExitStack() as cleanup:
        children = cleanup.enter_context(stopping([]))
        config = StackConfig(
            model="embedded",
            draft_model="embedded",
            dtype="float32",
            num_speculative_tokens=4,
            scorer_threads=1,  # more would spin: CPU time that says nothing
            proposer_threads=1,
            start_timeout_s=120.0,
            methods=("draft_model",),
            wrapper=("benchmarks.switched",),
            env=(("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),),
        )
        stack = Stack(config, children, folder)
        cleanup.callback(stack.close)
        stack.require_proposers()
        scraped = cleanup.enter_context(scraping(stack.metrics_url))
        yield Bench(stack, children, scraped)


@contextlib.contextmanager
def scraping(url: str) -> Iterator[threading.Event]:
    """Read /metrics every second while the event is set, as Prometheus would."""
    wanted, over = threading.Event(), threading.Event()

    def scrape() -> None:
        while not over.wait(_SCRAPE_S):
            if wanted.is_set():
                request = urllib.request.Request(
                    url, headers={"Accept": "application/openmetrics-text;version=1.0.0"}
                )
                urllib.request.urlopen(request, timeout=10).read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield wanted
    finally:
        over.set()
        thread.join(timeout=10)


def measure(bench: Bench, seconds: float, max_tokens: int, at_once: int) -> list[Turn]:
    """Turn, in order: muted, another, muted, another, ..., muted."""
    known = prompts.load(None, resolve_model("embedded", "target"), count=48, max_prompt_tokens=64)
    group = known.group(0, max(2, at_once))

    def turn(mode: str) -> Turn:
        return bench.turn(mode, group, max_tokens, at_once)

    for _ in range(_WARM_UP_TURNS):
        turn("all")
    others = [mode for mode in MODES if mode != "muted"]
    rng, deadline, turns = random.Random(0), time.monotonic() + seconds, [turn("muted")]
    while time.monotonic() < deadline:
        for mode in rng.sample(others, len(others)):
            turns += [turn(mode), turn("muted")]
    return turns


@dataclass(frozen=True)
class Pair:
    """A turn and its muted neighbours, which did the same work."""

    turn: Turn
    neighbours: tuple[Turn, Turn]

    @property
    def lost(self) -> float:
        """Of the neighbours' tokens/s, in percent."""
        return 100 * (1 - statistics.mean(n.seconds for n in self.neighbours) / self.turn.seconds)

    @property
    def more(self) -> float:
        """CPU time beside the models than the neighbours, in percent of all that they used."""
        beside = self.turn.beside_s - statistics.mean(n.beside_s for n in self.neighbours)
        return 100 * beside / statistics.mean(n.cpu_s for n in self.neighbours)


def pairs(turns: Sequence[Turn]) -> list[Pair]:
    """Of turns in `measure`'s order. Raises `ProcessError` if many of them did different work."""
    ((usual, _),) = Counter(turn.work for turn in turns).most_common(1)
    alike = sum(turn.work.like(usual) for turn in turns)
    if alike < _SAME * len(turns):
        raise ProcessError(f"only {alike} of {len(turns)} turns did the same work: {usual}")
    muted = turns[::2]
    found = [
        Pair(turn, (before, after))
        for before, turn, after in (
            *zip(muted, turns[1::2], muted[1:], strict=False),
            *zip(muted, muted[1:], muted[2:], strict=False),
        )
        if all(each.work.like(usual) for each in (before, turn, after))
    ]
    if {pair.turn.mode for pair in found} != set(MODES):
        raise ProcessError(f"{len(turns)} turns are too few; give more --seconds")
    return found


def report(compared: dict[int, list[Pair]]) -> None:
    """A table of costs against the muted turns, in percent, and what they must add up to."""
    print(
        "| at once | pairs | mode | tokens/s | lost, % | CPU per token, us | beside, % | more, % |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for rows in compared:
        for mode in MODES:
            found = [pair for pair in compared[rows] if pair.turn.mode == mode]
            speed = statistics.median(p.turn.work.tokens / p.turn.seconds for p in found)
            cpu_us = statistics.median(p.turn.cpu_s * 1e6 / p.turn.work.tokens for p in found)
            beside = statistics.median(100 * p.turn.beside_s / p.turn.cpu_s for p in found)
            lost, more = [p.lost for p in found], [p.more for p in found]
            print(
                f"| {rows} | {len(found)} | {mode} | {speed:.1f} | {interval(lost)} "
                f"| {cpu_us:.0f} | {beside:.1f} | {interval(more)} |"
            )
    make_us, send_us = spans_cost_us()
    for rows, all_pairs in compared.items():
        work = all_pairs[0].turn.work
        cpu_us = statistics.median(pair.neighbours[0].cpu_s * 1e6 for pair in all_pairs)
        step_us = step_cost_us(rows)
        print(
            f"\nBy itself, with {rows} at once: counting a step takes the scorer {step_us:.0f} us, "
            f"{100 * step_us * work.steps / cpu_us:.2f}% of all CPU time; making a traced "
            f"request's spans {make_us:.0f} us and encoding them {send_us:.0f} us, "
            f"{100 * (make_us + send_us) * work.requests / cpu_us:.2f}%"
        )


def interval(values: Sequence[float]) -> str:
    """Median, the 90% interval of the median, and the middle half of the values."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    quarter = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return (
        f"{statistics.median(values):+.2f} [{medians[100]:+.2f}, {medians[1899]:+.2f}] "
        f"(turns {quarter[0]:+.1f} to {quarter[2]:+.1f})"
    )


if __name__ == "__main__":
    sys.exit(main())
