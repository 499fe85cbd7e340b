"""The scorer's Prometheus metrics: vLLM's names where they mean the same, under `outrider:`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.rpc.telemetry import METRIC_PREFIX
from outrider.types import FinishReason, RequestStats, StepTimings

_STEP_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.25, 0.5, 1.0),
)
_POWERS = tuple(float(2**i) for i in range(13))
_STEP_PARTS = ("schedule", "forward", "verify", "commit", "idle", "gap")


class ScorerMetrics:
    """Counters of one scorer. Speculation is counted when a request ends, trimmed output only."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

        self._drafts = self._counter(
            "spec_decode_num_drafts", "Rounds that verified at least one draft token."
        )
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_per_pos = Counter(
            METRIC_PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft, from 0.",
            ("model_name", "position"),
            registry=registry,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._preemptions = self._counter("num_preemptions", "Requests preempted and recomputed.")
        self._requests = Counter(
            METRIC_PREFIX + "request_success",
            "Requests ended, by reason; abort: the caller cancelled.",
            ("model_name", "finished_reason"),
            registry=registry,
        )
        self._blocks = Counter(
            METRIC_PREFIX + "draft_blocks",
            "Draft blocks by fate: hit, late, wrong (per round), stale, malformed (dropped).",
            ("model_name", "fate"),
            registry=registry,
        )
        self.stale_blocks = self._blocks.labels(model_name, "stale")
        self.malformed_blocks = self._blocks.labels(model_name, "malformed")
        self._hits, self._late, self._wrong = (
            self._blocks.labels(model_name, fate) for fate in ("hit", "late", "wrong")
        )
        self.proposers = Gauge(
            METRIC_PREFIX + "proposers_attached",
            "Proposers attached, by method.",
            ("method",),
            registry=registry,
        )
        step_time = Histogram(
            METRIC_PREFIX + "step_time_seconds",
            "Where an engine step's time goes; idle: waiting for drafts or work before it; gap: "
            "host time between the result of a step and the launch of one that follows directly.",
            ("model_name", "part"),
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._step_parts = [step_time.labels(model_name, part) for part in _STEP_PARTS]
        self._step_rows = self._histogram("step_rows", "Rows in an engine step.")
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Query tokens in an engine step."
        )

    def watch(self, name: str, description: str, read: Callable[[], float]) -> None:
        """A gauge read when scraped, on the scraper's thread."""
        gauge = Gauge(METRIC_PREFIX + name, description, ("model_name",), registry=self._registry)
        gauge.labels(self._model_name).set_function(read)

    def count_request(self, stats: RequestStats, finish_reason: FinishReason | None) -> None:
        """One ended request; `finish_reason` None: aborted."""
        reason = finish_reason.value if finish_reason is not None else "abort"
        self._requests.labels(self._model_name, reason).inc()
        self._drafts.inc(sum(stats.k_histogram[1:]))
        self._draft_tokens.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for position, accepted in enumerate(stats.accepted_per_pos):
            self._accepted_per_pos.labels(self._model_name, position).inc(accepted)
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._generation_tokens.inc(stats.output_tokens)
        self._prefix_hits.inc(stats.cached_prompt_tokens)
        self._prefix_queries.inc(stats.prompt_tokens)
        self._preemptions.inc(stats.preemptions)
        self._hits.inc(stats.hits)
        self._late.inc(stats.misses_late)
        self._wrong.inc(stats.misses_wrong)

    def observe_step(self, timings: StepTimings) -> None:
        parts = (
            timings.schedule_ms,
            timings.forward_ms,
            timings.verify_ms,
            timings.commit_ms,
            timings.idle_ms,
            timings.gap_ms,
        )
        for histogram, milliseconds in zip(self._step_parts, parts, strict=True):
            if milliseconds is not None:
                histogram.observe(milliseconds / 1e3)
        self._step_rows.observe(timings.num_rows)
        self._step_tokens.observe(timings.num_tokens)

    def _counter(self, name: str, description: str) -> Counter:
        counter = Counter(
            METRIC_PREFIX + name, description, ("model_name",), registry=self._registry
        )
        return counter.labels(self._model_name)

    def _histogram(self, name: str, description: str) -> Histogram:
        histogram = Histogram(
            METRIC_PREFIX + name,
            description,
            ("model_name",),
            buckets=_POWERS,
            registry=self._registry,
        )
        return histogram.labels(self._model_name)
