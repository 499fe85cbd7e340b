"""Measure the CPU time that metrics and traces take of a scorer.

    python -m benchmarks.telemetry_cost [--rows 1 8 32]

Each part is measured alone, on one thread, as the best of many tries: counting a step in the
metrics, making the spans of a traced request, and encoding these spans for the exporter.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from benchmarks.lib import report
from outrider.counts import StepCounts
from outrider.rpc.telemetry import Telemetry
from outrider.types import Commit, StepTimings, TokenKind
from scorer_service.metrics import ScorerMetrics
from scorer_service.round_spans import MAX_ROUNDS, RoundSpans

_TRIES = 30  # their spans fit into the exporter's queue


def step_cost_us(rows: int) -> float:
    """Return the CPU time to count one step of so many rows."""
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
    return _best_us(lambda: metrics.observe_step(timings, counts))


def spans_cost_us() -> tuple[float, float]:
    """Return the CPU time to make the spans of a traced request, and to encode them."""
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("outrider-scorer", exporter, batch=True)
    parent = telemetry.tracer.start_span("request")
    commit = Commit(1, 8, (7, 8), (TokenKind.ACCEPTED, TokenKind.BONUS), 4)
    timings = StepTimings(0.1, 20.0, 1.0, 0.2, 0.1, 1, 5, 0.3)

    def request() -> None:
        rounds = RoundSpans(itertools.count(10**18, 30_000_000).__next__)
        for _ in range(MAX_ROUNDS + 2):
            rounds.block(1000)
            rounds.commit(commit, timings)
        telemetry.record(parent, rounds.end(None))

    make_us = _best_us(request)
    telemetry.shutdown()
    one = exporter.get_finished_spans()[: 2 + 6 * MAX_ROUNDS]
    return make_us, _best_us(lambda: encode_spans(one).SerializeToString())


def _best_us(work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(_TRIES):
        began = time.thread_time_ns()
        work()
        best = min(best, time.thread_time_ns() - began)
    return best / 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the table."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of a step")
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/telemetry_cost"))
    args = p.parse_args(argv)
    make_us, encode_us = spans_cost_us()
    costs = {f"count a step of {rows} rows": step_cost_us(rows) for rows in args.rows}
    costs |= {"make the spans of a request": make_us, "encode the spans of a request": encode_us}
    machine, command = report.machine(), report.command("benchmarks.telemetry_cost")
    body = [[name, report.number(us, 0)] for name, us in costs.items()]
    lines = report.head("CPU time of telemetry in a scorer", command, machine)
    text = "\n".join([*lines, *report.table(["what", "CPU us"], body), ""])
    print(text)
    setup = {**machine, "command": command}
    report.write({"setup": setup, "results": costs}, text, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
