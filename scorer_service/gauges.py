"""What is read when a scraper asks: how full the scorer is."""

from __future__ import annotations

from outrider.engine.worker import EngineWorker
from scorer_service.config import ServedModel
from scorer_service.drafting.registry import ProposerRegistry
from scorer_service.metrics import ScorerMetrics


def watch(
    metrics: ScorerMetrics, worker: EngineWorker, roster: ProposerRegistry, served: ServedModel
) -> None:
    """Register the gauges. They read single values that the other threads replace as a whole."""

    def kv_usage() -> float:
        snapshot = worker.snapshot()
        return 1.0 - snapshot.free_pages / max(1, snapshot.total_pages)

    metrics.watch(
        "num_requests_running", "Requests in the batch.", lambda: worker.snapshot().running
    )
    metrics.watch(
        "num_requests_waiting", "Requests in the queue.", lambda: worker.snapshot().waiting
    )
    metrics.watch("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", kv_usage)
    metrics.watch(
        "num_requests_undrafted",
        "Requests that want a proposer and have none: none is attached, fits or has room.",
        lambda: roster.num_undrafted,
    )
    metrics.watch(
        "num_speculative_tokens",
        "K where a request names none; 0: speculation is off.",
        lambda: served.num_speculative_tokens,
    )
