"""A proposer's Prometheus instruments."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.rpc.telemetry import METRIC_PREFIX

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)


class ProposerMetrics:
    """Made once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def name(suffix: str) -> str:
            return f"{METRIC_PREFIX}proposer_{suffix}"

        self.draft_tokens = Counter(
            name("draft_tokens"), "Draft tokens produced.", registry=registry
        )
        self.cycle = Histogram(
            name("cycle_seconds"),
            "Time of one drafting cycle, from messages taken to blocks handed over.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.forward = Histogram(
            name("forward_seconds"),
            "Time of one drafting cycle spent in the model.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.ahead = Histogram(
            name("ahead_seconds"),
            "Time of guessing past the drafts, while the scorer verifies them.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.branch_tokens = Counter(
            name("ahead_tokens"),
            "Tokens in trees that were guessed ahead, drafts included.",
            registry=registry,
        )
        self.batch_size = Histogram(
            name("cycle_sessions"),
            "Sessions in one drafting cycle.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )
        self.sessions = Gauge(name("sessions"), "Sessions held.", registry=registry)
        self.links = Gauge(name("links"), "Scorers connected.", registry=registry)
        self.lost = Counter(name("lost_sessions"), "Sessions evicted.", registry=registry)
        self.malformed = Counter(
            name("malformed_messages"),
            "Messages that were dropped.",
            registry=registry,
        )
