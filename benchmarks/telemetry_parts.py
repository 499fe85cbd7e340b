"""What single parts of telemetry cost the scorer, each measured alone."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from outrider.counts import StepCounts
from outrider.rpc.telemetry import Telemetry
from outrider.types import Commit, StepTimings, TokenKind
from scorer_service.metrics import ScorerMetrics
from scorer_service.round_spans import MAX_ROUNDS, RoundSpans

_TRIES = 30  # their spans fit into the queue


def step_cost_us(rows: int) -> float:
    """CPU time of the event loop to count one step of so many rows."""
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
    return best_us(lambda: metrics.observe_step(timings, counts))


def spans_cost_us() -> tuple[float, float]:
    """CPU time to note and make the spans of a traced request, and to send them, in the scorer."""
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

    make_us = best_us(request)
    telemetry.shutdown()
    one = exporter.get_finished_spans()[: 2 + 6 * MAX_ROUNDS]
    return make_us, best_us(lambda: encode_spans(one).SerializeToString())


def best_us(work: Callable[[], object]) -> float:
    """CPU time of this thread; the best of many tries."""
    best = math.inf
    for _ in range(_TRIES):
        began = time.thread_time_ns()
        work()
        best = min(best, time.thread_time_ns() - began)
    return best / 1e3
