"""The scorer's Prometheus metrics: vLLM's names where they mean the same, under `outrider:`.

Everything advances with each engine step, from the sums that come with its events: the cost does
not grow with tokens, and hardly with rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.counts import StepCounts
from outrider.engine.policy.draft_mode import DraftMode
from outrider.features import FeatureBatch
from outrider.rpc.telemetry import METRIC_PREFIX
from outrider.types import FinishReason, RequestStats, StepTimings

_STEP_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.25, 0.5, 1.0),
)
_REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0, 160.0),
)
_POWERS = tuple(float(2**i) for i in range(13))
_MAX_PROPOSERS, _MAX_POOLS = 1024, 256
_OTHER = "other"  # pool of proposers beyond these limits
ROUND_FATES = ("hit", "late", "wrong")
_STEP_PARTS = ("draft", "schedule", "forward", "verify", "commit", "idle", "gap")
_ROUND_PARTS = ("propose", "network", "wait", "score", "commit")


class ScorerMetrics:
    """Counters of one scorer. Written on the event loop."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

        self._drafts = self._counter(
            "spec_decode_num_drafts", "Rounds that verified at least one draft token."
        )
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        per_pos = self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft, from 0.",
            "position",
        )
        rounds = self._counters(
            "spec_decode_num_rounds",
            "Rounds of requests, by draft tokens verified (0: the row went without a draft).",
            "num_draft_tokens",
        )
        # Looking a label up costs more than counting.
        self._accepted_per_pos = cache(lambda position: per_pos.labels(model_name, position))
        self._accepted_per_pos(0)  # a draft that never fits has its 0, too
        self._rounds = cache(lambda k: rounds.labels(model_name, k))
        pool_drafted = self._counters(
            "pool_draft_tokens", "Draft tokens verified, by the pool of their proposer.", "pool"
        )
        pool_accepted = self._counters(
            "pool_accepted_tokens", "Draft tokens accepted, by the pool of their proposer.", "pool"
        )
        pool_rounds = Counter(
            METRIC_PREFIX + "pool_rounds",
            "Rounds that wanted a draft, by the pool of their proposer and the draft's fate: hit, "
            "late or wrong.",
            ("model_name", "pool", "fate"),
            registry=registry,
        )
        self._pool_rounds = cache(lambda pool, fate: pool_rounds.labels(model_name, pool, fate))
        self._pool_counters = cache(
            lambda pool: (
                pool_drafted.labels(model_name, pool),
                pool_accepted.labels(model_name, pool),
            )
        )
        self._pools: dict[str, str] = {}  # by proposer; the last ones that attached
        self._pool_names: set[str] = set()
        blocks = self._counters(
            "draft_blocks",
            "Draft blocks by fate: hit, late, wrong (per round), stale, malformed (dropped).",
            "fate",
        )
        self.stale_blocks = blocks.labels(model_name, "stale")
        self.malformed_blocks = blocks.labels(model_name, "malformed")
        self._fates = {fate: blocks.labels(model_name, fate) for fate in ROUND_FATES}
        steps = self._counters(
            "steps",
            "Engine steps, by the way in which rows come to drafts: none, on demand, or ahead, by "
            "proposers that can. An adaptive policy chooses it, and tries the others now and then.",
            "way",
        )
        self._steps = {way.value: steps.labels(model_name, way.value) for way in DraftMode}
        round_seconds = self._counters(
            "round_seconds",
            "Where rounds' time goes, summed over rounds. propose: in the proposer; network: from "
            "a commit to its draft's arrival otherwise; both pass while the scorer verifies if the "
            "proposer runs ahead. wait: of the row for the draft; score: from a step's launch to "
            "its result; commit: scheduling the step and making its result true.",
            "part",
        )
        self._round_parts = [round_seconds.labels(model_name, part) for part in _ROUND_PARTS]
        self._feature_rows = self._counter(
            "feature_rows", "Hidden states of the target read for proposers, in positions."
        )
        self._feature_bytes = self._counter("feature_bytes", "Of hidden states sent to proposers.")
        self._feature_seconds = self._counter(
            "feature_seconds", "Time of the engine's thread that reading hidden states took."
        )
        self._decode_seconds = self._counter(
            "decode_seconds", "Time of steps without prompt tokens, with waits for drafts."
        )
        self._plain_seconds = self._counter(
            "decode_plain_seconds",
            "What the output of these steps would have taken without drafts, by the times of steps "
            "measured lately; divided by decode_seconds, the speedup.",
        )

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens admitted.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._preemptions = self._counter("num_preemptions", "Requests preempted and recomputed.")
        self._requests = self._counters(
            "request_success",
            "Requests ended, by reason; abort: the caller cancelled.",
            "finished_reason",
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds",
            "Time from a request's arrival to its first step, observed at that step.",
            _REQUEST_SECONDS,
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds",
            "Time from a request's first step to its first token, without waits when preempted.",
            _REQUEST_SECONDS,
        )

        self.proposers = Gauge(
            METRIC_PREFIX + "proposers_attached",
            "Proposers attached, by pool and method; 0 once the last of a pool has left.",
            ("model_name", "pool", "method"),
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
        self._step_rows = self._histogram("step_rows", "Rows in an engine step.", _POWERS)
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Query tokens in an engine step.", _POWERS
        )
        self._step_output = self._histogram(
            "step_output_tokens", "Tokens that an engine step added to its rows.", _POWERS
        )

    def watch(self, name: str, description: str, read: Callable[[], float]) -> None:
        """A gauge read when scraped, on the scraper's thread."""
        gauge = Gauge(METRIC_PREFIX + name, description, ("model_name",), registry=self._registry)
        gauge.labels(self._model_name).set_function(read)

    def attached(self, proposer_id: str, pool: str) -> None:
        """From now on a proposer's drafts are counted for its pool."""
        # It may call itself and its pool what it likes, but not fill the memory with names.
        self._pool_names.add(pool if len(self._pool_names) < _MAX_POOLS else _OTHER)
        pool = pool if pool in self._pool_names else _OTHER
        self._pools.pop(proposer_id, None)
        self._pools[proposer_id] = pool
        for fate in ROUND_FATES:
            self._pool_rounds(pool, fate)  # a rate begins at the first count only from 0
        if len(self._pools) > _MAX_PROPOSERS:
            del self._pools[next(iter(self._pools))]

    def set_proposers(self, attached: int, pool: str, method: str) -> None:
        """How many proposers of a pool are attached."""
        self.proposers.labels(self._model_name, pool, method).set(attached)

    def count_request(self, stats: RequestStats | None, finish_reason: FinishReason | None) -> None:
        """One ended request; `finish_reason` None: aborted, perhaps before there were `stats`."""
        reason = finish_reason.value if finish_reason is not None else "abort"
        self._requests.labels(self._model_name, reason).inc()
        if stats is not None:
            self._prefill_time.observe(stats.prefill_ms / 1e3)

    def observe_step(self, timings: StepTimings, counts: StepCounts) -> None:
        """One engine step."""
        parts = (
            timings.draft_ms or None,
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
        self._step_output.observe(counts.output_tokens)
        if counts.way:
            self._steps[counts.way].inc()
        self._generation_tokens.inc(counts.output_tokens)
        self._preemptions.inc(counts.preemptions)
        for queue_s, prompt_tokens, cached in counts.admissions:
            self._queue_time.observe(queue_s)
            self._prompt_tokens.inc(prompt_tokens)
            self._prefix_queries.inc(prompt_tokens)
            self._prefix_hits.inc(cached)
        self._count_rounds(timings, counts)

    def count_features(self, batch: FeatureBatch, sent_bytes: int) -> None:
        """Hidden states that were read, and how much of them was sent."""
        rows = sum(len(part.rows) // part.order.spec.row_bytes for part in batch.rows)
        self._feature_rows.inc(rows)
        self._feature_bytes.inc(sent_bytes)
        self._feature_seconds.inc(batch.seconds)

    def _count_rounds(self, timings: StepTimings, counts: StepCounts) -> None:
        drafts = draft_tokens = accepted_tokens = 0
        by_k: dict[int, int] = {}
        by_position: dict[int, int] = {}
        for (drafted, accepted), rounds in counts.rounds.items():
            by_k[drafted] = by_k.get(drafted, 0) + rounds
            drafts += rounds if drafted else 0
            draft_tokens += rounds * drafted
            accepted_tokens += rounds * accepted
            for position in range(accepted):
                by_position[position] = by_position.get(position, 0) + rounds
        self._drafts.inc(drafts)
        self._draft_tokens.inc(draft_tokens)
        self._accepted.inc(accepted_tokens)
        for k, rounds in by_k.items():
            self._rounds(k).inc(rounds)
        for position, rounds in by_position.items():
            self._accepted_per_pos(position).inc(rounds)
        for proposer_id, tokens in counts.drafted_by.items():
            of_drafts, of_accepted = self._pool_counters(self._pools.get(proposer_id, _OTHER))
            of_drafts.inc(tokens)
            of_accepted.inc(counts.accepted_by[proposer_id])
        for (proposer_id, fate), rounds in counts.fates.items():
            self._fates[fate].inc(rounds)
            self._pool_rounds(self._pools.get(proposer_id, _OTHER), fate).inc(rounds)

        host_s = (timings.schedule_ms + timings.commit_ms) / 1e3
        commit_s = host_s * counts.rounds.total()
        parts = (counts.propose_s, counts.network_s, counts.wait_s, counts.score_s, commit_s)
        for counter, seconds in zip(self._round_parts, parts, strict=True):
            counter.inc(seconds)
        if counts.plain_s:
            self._plain_seconds.inc(counts.plain_s)
            # Rows waited longer than the engine if other rows' steps ran meanwhile.
            waited_s = min(timings.idle_ms / 1e3, counts.wait_s)
            step_s = (timings.draft_ms + timings.forward_ms + timings.verify_ms) / 1e3
            self._decode_seconds.inc(host_s + step_s + waited_s)

    def _counter(self, name: str, description: str) -> Counter:
        counter = Counter(
            METRIC_PREFIX + name, description, ("model_name",), registry=self._registry
        )
        return counter.labels(self._model_name)

    def _counters(self, name: str, description: str, label: str) -> Counter:
        return Counter(
            METRIC_PREFIX + name, description, ("model_name", label), registry=self._registry
        )

    def _histogram(self, name: str, description: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            METRIC_PREFIX + name,
            description,
            ("model_name",),
            buckets=buckets,
            registry=self._registry,
        )
        return histogram.labels(self._model_name)
