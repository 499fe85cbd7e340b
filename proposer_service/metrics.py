"""Prometheus metrics of a proposer, labelled by its pool."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

from outrider.drafting.proposer import LoopRun
from outrider.rpc.telemetry import METRIC_PREFIX

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
_SESSIONS = tuple(float(2**i) for i in range(9))


class ProposerMetrics:
    """The metrics of one proposer."""

    def __init__(self, registry: CollectorRegistry, pool: str = "default") -> None:
        prefix, labels = METRIC_PREFIX + "proposer_", ("pool",)

        def counter(name: str, description: str) -> Counter:
            return Counter(prefix + name, description, labels, registry=registry).labels(pool)

        def gauge(name: str, description: str) -> Gauge:
            return Gauge(prefix + name, description, labels, registry=registry).labels(pool)

        def histogram(
            name: str, description: str, buckets: tuple[float, ...] = _SECONDS
        ) -> Histogram:
            return Histogram(
                prefix + name, description, labels, buckets=buckets, registry=registry
            ).labels(pool)

        self.draft_tokens = counter("draft_tokens", "Draft tokens produced.")
        self.cycle = histogram(
            "cycle_seconds",
            "Time of one drafting cycle, from messages taken to blocks handed over. The rate of "
            "its sum is the part of the time that is spent on drafts which are waited for.",
        )
        self.forward = histogram(
            "forward_seconds", "Time of one drafting cycle spent in the model."
        )
        self.ahead = histogram(
            "ahead_seconds", "Time of guessing past the drafts, while the scorer verifies them."
        )
        self.branch_tokens = counter(
            "ahead_tokens", "Tokens in trees that were guessed ahead, drafts included."
        )
        self._pool, shape = pool, (*labels, "rows", "tokens")
        self._loops = Summary(
            prefix + "loop_seconds",
            "Time of one batch of drafts with candidates in the model, by its rows, padding "
            "included and rounded up to a power of two or three halves of one, and the tokens of "
            "each.",
            shape,
            registry=registry,
        )
        self._loop_rows = Counter(
            prefix + "loop_rows",
            "Rows of these batches without padding: `draft` for a session that had none, `branch` "
            "for an outcome of a running verification.",
            (*shape, "kind"),
            registry=registry,
        )
        for kind in ("draft", "branch"):  # there from the start, so that queries find them
            self._loop_rows.labels(pool, "1", "1", kind)
        self._loops.labels(pool, "1", "1")
        self.batch_size = histogram("cycle_sessions", "Sessions in one drafting cycle.", _SESSIONS)
        self.sessions = gauge("sessions", "Sessions held.")
        self.session_limit = gauge("session_limit", "Sessions that can be held at once.")
        self.links = gauge("links", "Scorers connected.")
        self.lost = counter("lost_sessions", "Sessions turned away for want of room, or evicted.")
        self.malformed = counter("malformed_messages", "Messages that were dropped.")

    def loop(self, run: LoopRun) -> None:
        shape = self._pool, str(_rounded(run.captured)), str(run.tokens)
        self._loops.labels(*shape).observe(run.seconds)
        for kind, rows in (("draft", run.drafts), ("branch", run.branches)):
            if rows:
                self._loop_rows.labels(*shape, kind).inc(rows)


def _rounded(rows: int) -> int:
    """Return at least `rows`, of which two bits count: else any number would be a series."""
    unit = 1 << max(0, (rows - 1).bit_length() - 2)
    return -(-rows // unit) * unit
