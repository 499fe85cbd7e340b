"""Show the load of a gateway's scorers as metrics, as if they were one engine."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.admission import Admission
from gateway.routing.scorers import ScorerPool
from gateway.workers.shared import HELD, SharedCounts


class ScorerLoad:
    """Sums over the scorers that serve, read when scraped, on the scraper's thread.

    A request that no scorer has yet, because none serves, counts as waiting.
    """

    def __init__(
        self, pool: ScorerPool, admission: Admission, shared: SharedCounts | None = None
    ) -> None:
        """Count the requests that other workers hold, too, if any are `shared`."""
        self._pool = pool
        self._admission = admission
        self._shared = shared

    @property
    def held(self) -> int:
        """Requests of this process that no scorer has."""
        at_scorers = sum(scorer.in_flight for scorer in self._pool.scorers)
        return max(0, self._admission.in_flight - at_scorers)

    def collector(self, prefix: str, model_name: str | None = None) -> Collector:
        """Return a collector of metrics that begin with `prefix`; with a name, as vLLM has them."""
        return _Collector(self, prefix, model_name)

    def metrics(self, prefix: str, model_name: str | None) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        scorers = self._pool.serving
        infos = [scorer.info for scorer in scorers]
        held = self.held + (0 if self._shared is None else self._shared.elsewhere(HELD))
        total = sum(info.total_pages for info in infos)
        used = total - sum(info.free_pages for info in infos)
        names = {} if model_name is None else {"model_name": model_name}
        waiting = sum(info.waiting_requests for info in infos) + held
        for name, about, value in (
            (
                "num_requests_running",
                "Requests in the scorers' batches.",
                sum(info.running_requests for info in infos),
            ),
            ("num_requests_waiting", "Requests queued at scorers, or held for one.", waiting),
            ("kv_cache_usage_perc", "Part of their KV caches in use.", used / max(1, total)),
        ):
            yield _gauge(prefix + name, about, names, value)
        if model_name is not None and infos:
            sizes = {"block_size": str(infos[0].page_size), "num_gpu_blocks": str(total)}
            about = "Pages of the scorers' KV caches, and tokens in each."
            yield _gauge(prefix + "cache_config_info", about, names | sizes, 1)


class _Collector(Collector):
    def __init__(self, load: ScorerLoad, prefix: str, model_name: str | None) -> None:
        self._load, self._prefix, self._model_name = load, prefix, model_name

    def collect(self) -> Iterator[Metric]:
        return self._load.metrics(self._prefix, self._model_name)


def _gauge(name: str, about: str, labels: dict[str, str], value: float) -> Metric:
    gauge = GaugeMetricFamily(name, about, labels=list(labels))
    gauge.add_metric(list(labels.values()), value)
    return gauge
