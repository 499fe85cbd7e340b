"""Prometheus metrics of a scorer, with vLLM's names where they mean the same.

Counters advance once per engine step, by the sums in its events (`StepCounts` in
outrider/counts.py), so the cost does not grow with tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from outrider.bounded import remember
from outrider.counts import DRAFT_FATES, DRAFT_MODES, StepCounts, context_class_from, sum_rounds
from outrider.features import FeatureBatch
from outrider.rpc import latency
from outrider.rpc.telemetry import METRIC_PREFIX
from outrider.types import FinishReason, RequestStats, StepTimings

_STEP_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.25, 0.5, 1.0),
)
_REQUEST_S = (*latency.REQUEST_S, 160.0)
_POWERS = tuple(float(2**i) for i in range(13))
_MAX_PROPOSERS, _MAX_POOLS = 1024, 256
_OTHER = "other"  # the pool of proposers beyond these limits
_STEP_PARTS = ("draft", "schedule", "forward", "verify", "commit", "idle", "gap")
_ROUND_PARTS = ("propose", "network", "wait", "score", "commit")
_COUNTERS = {
    "spec_decode_num_drafts": "Rounds that verified at least one draft token.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "feature_rows": "Hidden states of the target read for proposers, in positions.",
    "feature_bytes": "Of hidden states sent to proposers.",
    "feature_seconds": "Time of the engine's thread that reading hidden states took.",
    "decode_seconds": "Time of steps without prompt tokens, with waits for drafts.",
    "decode_plain_seconds": (
        "What the output of these steps would have taken without drafts, by the times of steps "
        "measured lately; divided by decode_seconds, the speedup."
    ),
    "prompt_tokens": "Prompt tokens admitted.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "num_preemptions": "Requests preempted and recomputed.",
}
_BY_CONTEXT = ", by the tokens before: `context` and more, below the next `context`."
_LABELLED = {
    "spec_decode_num_accepted_tokens_per_pos": (
        "Draft tokens accepted, by position in the draft, from 0.",
        "position",
    ),
    "spec_decode_num_drafts_per_context": ("Rounds that verified a draft" + _BY_CONTEXT, "context"),
    "spec_decode_num_accepted_tokens_per_context": (
        "Draft tokens accepted" + _BY_CONTEXT,
        "context",
    ),
    "spec_decode_num_rounds": (
        "Rounds of requests, by draft tokens verified (0: the row went without a draft).",
        "num_draft_tokens",
    ),
    "pool_draft_tokens": ("Draft tokens verified, by the pool of their proposer.", "pool"),
    "pool_accepted_tokens": ("Draft tokens accepted, by the pool of their proposer.", "pool"),
    "pool_rounds": (
        "Rounds that wanted a draft, by the pool of their proposer and the draft's fate. hit: at "
        "hand at once; waited: came while the row waited, on demand; late; wrong: for another "
        "text; none: the proposer had no guess.",
        "pool",
        "fate",
    ),
    "draft_blocks": ("Draft blocks dropped, by fate: stale or malformed.", "fate"),
    "steps": (
        "Engine steps, by the draft mode: none, on demand, or ahead, if a row's proposer can. The "
        "adaptive policy chooses whether to draft, and now and then tries the other.",
        "mode",
    ),
    "round_seconds": (
        "Where rounds' time goes, summed over rounds. propose: in the proposer; network: from a "
        "commit to its draft's arrival otherwise; both pass while the scorer verifies if the "
        "proposer runs ahead. wait: of the row for the draft; score: from a step's launch to its "
        "result; commit: scheduling the step and making its result true.",
        "part",
    ),
    "request_success": (
        "Requests ended, by reason; abort: the caller cancelled.",
        "finished_reason",
    ),
}
"""Name -> what a counter counts, and its labels."""
_HISTOGRAMS = {
    "request_queue_time_seconds": (
        "Time from a request's arrival to its first step, observed at that step.",
        _REQUEST_S,
    ),
    "request_prefill_time_seconds": (
        "Time from a request's first step to its first token, without waits when preempted.",
        _REQUEST_S,
    ),
    "step_rows": ("Rows in an engine step.", _POWERS),
    "iteration_tokens_total": ("Query tokens in an engine step.", _POWERS),
    "step_output_tokens": ("Tokens that an engine step added to its rows.", _POWERS),
}


class EngineMetrics:
    """Passes on an engine's own metrics, which it keeps in the process's global registry."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield those whose names begin with the prefix."""
        yield from (each for each in REGISTRY.collect() if each.name.startswith(self._prefix))


class ScorerMetrics:
    """Metrics of one scorer. Written on the event loop."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name
        self._counters = {name: self._counter(name, about)() for name, about in _COUNTERS.items()}
        self._histograms = {
            name: Histogram(
                METRIC_PREFIX + name, about, ("model_name",), buckets=buckets, registry=registry
            ).labels(model_name)
            for name, (about, buckets) in _HISTOGRAMS.items()
        }
        self._labelled = {name: self._counter(name, *each) for name, each in _LABELLED.items()}
        self._labelled["spec_decode_num_accepted_tokens_per_pos"](0)  # also if none ever is
        self._pools: dict[str, str] = {}  # by proposer; the last ones that attached
        self._pool_names: set[str] = set()
        blocks, steps = self._labelled["draft_blocks"], self._labelled["steps"]
        self.stale_blocks, self.malformed_blocks = blocks("stale"), blocks("malformed")
        self._steps = {mode: steps(mode) for mode in DRAFT_MODES}
        self._round_parts = [self._labelled["round_seconds"](part) for part in _ROUND_PARTS]
        self.proposers = Gauge(
            METRIC_PREFIX + "proposers_attached",
            "Proposers attached, by pool and method; 0 once the last of a pool has left.",
            ("model_name", "pool", "method"),
            registry=registry,
        )
        self._attached_before: set[tuple[str, str]] = set()
        step_time = Histogram(
            METRIC_PREFIX + "step_time_seconds",
            "Where an engine step's time goes; idle: waiting for drafts or work before it; gap: "
            "host time between the result of a step and the launch of one that follows directly.",
            ("model_name", "part"),
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._step_parts = [step_time.labels(model_name, part) for part in _STEP_PARTS]

    def watch(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Register a gauge that is read when scraped, on the scraper's thread."""
        gauge = Gauge(METRIC_PREFIX + name, description, ("model_name",), registry=self._registry)
        gauge.labels(self._model_name).set_function(read)

    def attached(self, proposer_id: str, pool: str) -> None:
        """Count a proposer's drafts for its pool from now on."""
        # Proposers choose these names, so their number is bounded.
        self._pool_names.add(pool if len(self._pool_names) < _MAX_POOLS else _OTHER)
        pool = pool if pool in self._pool_names else _OTHER
        remember(self._pools, proposer_id, pool, _MAX_PROPOSERS)
        for fate in DRAFT_FATES:
            # Reported from 0, so that a rate includes the first.
            self._labelled["pool_rounds"](pool, fate)

    def set_proposers(self, attached: Mapping[tuple[str, str], int]) -> None:
        """Report the attached proposers by pool and method."""
        for pool_and_method in attached:
            if len(self._attached_before) < _MAX_POOLS:
                self._attached_before.add(pool_and_method)
        for pool, method in self._attached_before:
            number = attached.get((pool, method), 0)
            self.proposers.labels(self._model_name, pool, method).set(number)

    def count_request(self, stats: RequestStats | None, finish_reason: FinishReason | None) -> None:
        """Count an ended request; without a `finish_reason` it was aborted."""
        reason = finish_reason.value if finish_reason is not None else "abort"
        self._labelled["request_success"](reason).inc()
        if stats is not None:
            self._histograms["request_prefill_time_seconds"].observe(stats.prefill_ms / 1e3)

    def observe_step(self, timings: StepTimings | None, counts: StepCounts) -> None:
        """Count a step; without `timings`, of an engine that does not tell them."""
        if timings is not None:
            self._observe_times(timings, counts)
        self._histograms["step_output_tokens"].observe(counts.output_tokens)
        if counts.draft_mode:
            self._steps[counts.draft_mode].inc()
        self._counters["generation_tokens"].inc(counts.output_tokens)
        if counts.preemptions:
            self._counters["num_preemptions"].inc(counts.preemptions)
        for queue_s, prompt_tokens, cached in counts.admissions:
            self._histograms["request_queue_time_seconds"].observe(queue_s)
            self._counters["prompt_tokens"].inc(prompt_tokens)
            self._counters["prefix_cache_queries"].inc(prompt_tokens)
            self._counters["prefix_cache_hits"].inc(cached)
        self._count_rounds(counts)

    def count_features(self, batch: FeatureBatch, sent_bytes: int) -> None:
        """Count hidden states that were read, and their bytes that were sent."""
        rows = sum(len(part.rows) // part.order.spec.row_bytes for part in batch.rows)
        self._counters["feature_rows"].inc(rows)
        self._counters["feature_bytes"].inc(sent_bytes)
        self._counters["feature_seconds"].inc(batch.seconds)

    def _count_rounds(self, counts: StepCounts) -> None:
        sums = sum_rounds(counts.rounds)
        if sums.drafted:
            self._counters["spec_decode_num_drafts"].inc(counts.rounds.total() - sums.by_k[0])
            self._counters["spec_decode_num_draft_tokens"].inc(sums.drafted)
            self._counters["spec_decode_num_accepted_tokens"].inc(sums.accepted)
        labelled = self._labelled
        for k, rounds in sums.by_k.items():
            labelled["spec_decode_num_rounds"](k).inc(rounds)
        for position, rounds in sums.by_position.items():
            labelled["spec_decode_num_accepted_tokens_per_pos"](position).inc(rounds)
        for index, rounds in counts.drafts_by_context.items():
            context, accepted = context_class_from(index), counts.accepted_by_context[index]
            labelled["spec_decode_num_drafts_per_context"](context).inc(rounds)
            labelled["spec_decode_num_accepted_tokens_per_context"](context).inc(accepted)
        for proposer_id, tokens in counts.drafted_by.items():
            pool = self._pools.get(proposer_id, _OTHER)
            labelled["pool_draft_tokens"](pool).inc(tokens)
            labelled["pool_accepted_tokens"](pool).inc(counts.accepted_by[proposer_id])
        for (proposer_id, fate), rounds in counts.fates.items():
            labelled["pool_rounds"](self._pools.get(proposer_id, _OTHER), fate).inc(rounds)

    def _observe_times(self, timings: StepTimings, counts: StepCounts) -> None:
        parts = (  # of 0 nothing is told: the engine has no such part
            timings.draft_ms or None,
            timings.schedule_ms or None,
            timings.forward_ms,
            timings.verify_ms or None,
            timings.commit_ms or None,
            timings.idle_ms,
            timings.gap_ms,
        )
        for histogram, milliseconds in zip(self._step_parts, parts, strict=True):
            if milliseconds is not None:
                histogram.observe(milliseconds / 1e3)
        self._histograms["step_rows"].observe(timings.num_rows)
        self._histograms["iteration_tokens_total"].observe(timings.num_tokens)
        host_s = (timings.schedule_ms + timings.commit_ms) / 1e3
        commit_s = host_s * counts.rounds.total()
        round_s = (counts.propose_s, counts.network_s, counts.wait_s, counts.score_s, commit_s)
        for counter, seconds in zip(self._round_parts, round_s, strict=True):
            if seconds:
                counter.inc(seconds)
        if counts.plain_s:
            self._counters["decode_plain_seconds"].inc(counts.plain_s)
            # Where other rows' steps ran meanwhile, rows waited longer than the engine.
            waited_s = min(timings.idle_ms / 1e3, counts.wait_s)
            step_s = (timings.draft_ms + timings.forward_ms + timings.verify_ms) / 1e3
            self._counters["decode_seconds"].inc(host_s + step_s + waited_s)

    def _counter(self, name: str, about: str, *labels: str) -> Callable[..., Counter]:
        """Return a function from values of `labels` to their counter."""
        counters = Counter(
            METRIC_PREFIX + name, about, ("model_name", *labels), registry=self._registry
        )
        # Looking a label up costs more than counting.
        return cache(lambda *values: counters.labels(self._model_name, *values))
