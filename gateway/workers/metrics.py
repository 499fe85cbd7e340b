"""One page of metrics for all workers of a gateway, whichever of them is asked.

Each worker writes its metrics into a file once a second and whenever it is asked itself. A worker
that ends leaves its file, and the next one in its place goes on from there: a counter that fell
would look to Prometheus like a restart, and all it had counted like one sudden increase.
`prometheus_client`'s own mode for several processes knows no exemplars and no computed gauges.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from gateway.processes import Worker

_ADDED: Final = ("counter", "histogram")
_ADDED_GAUGES: Final = frozenset({"outrider:gateway_requests_in_flight"})
"""The other gauges are the same in every worker, or nearly: the greatest counts."""
_log = logging.getLogger(__name__)


class WorkerMetrics(Collector):
    """Collects the sums over all workers; `registry` is this worker's own."""

    def __init__(self, registry: CollectorRegistry, worker: Worker) -> None:
        self._registry = registry
        self._file = _file(worker.folder, worker.index)
        self._others = [_file(worker.folder, n) for n in range(worker.count) if n != worker.index]
        self._before = [m for m in _read(self._file) if m.type in _ADDED]
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        pages = [self.save(), *map(_read, self._others)]
        return iter(merged([metric for page in pages for metric in page]))

    def save(self) -> Sequence[Metric]:
        """Write this worker's metrics for the others, and return them."""
        with self._lock:  # a page must not replace a later one
            page = merged([*self._registry.collect(), *self._before])
            try:
                _write(self._file, page)
            except OSError as error:  # a full disk ends no streams: the others see an older page
                _log.warning("the other workers get no metrics of this one: %s", error.strerror)
        return page


def retire(folder: Path, index: int) -> None:
    """Keep of a worker that has ended what it counted, but not how things stood."""
    file = _file(folder, index)
    try:
        _write(file, [metric for metric in _read(file) if metric.type in _ADDED])
    except OSError as error:
        _log.warning("metrics of worker %d stay as they were: %s", index, error.strerror)


def merged(metrics: Iterable[Metric]) -> list[Metric]:
    """Return one metric for each name, its samples added up or the greatest of them."""
    found: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[object, ...], Sample]] = {}
    for metric in metrics:
        if metric.name not in found:
            found[metric.name] = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        mine = samples.setdefault(metric.name, {})
        adds = metric.type in _ADDED or metric.name in _ADDED_GAUGES
        for sample in metric.samples:
            key = (sample.name, *sample.labels.items())
            mine[key] = _joined(mine[key], sample, adds=adds) if key in mine else sample
    for name, metric in found.items():
        metric.samples = list(samples[name].values())
    return list(found.values())


def _joined(one: Sample, other: Sample, *, adds: bool) -> Sample:
    value = one.value + other.value if adds else max(one.value, other.value)
    exemplars = [each.exemplar for each in (one, other) if each.exemplar is not None]
    latest = max(exemplars, key=lambda exemplar: exemplar.timestamp or 0, default=None)
    return one._replace(value=value, exemplar=latest)


def _file(folder: Path, index: int) -> Path:
    return folder / f"metrics-{index}.json"


def _write(file: Path, page: Iterable[Metric]) -> None:
    """Write a page in the place of the former, which others may be reading."""
    latest = file.with_suffix(".new")
    latest.write_text(json.dumps([_to_json(metric) for metric in page]))
    latest.replace(file)


def _read(file: Path) -> list[Metric]:
    """Return a worker's metrics; none if it has not written any yet."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return []
    return [_from_json(fields) for fields in json.loads(text)]


def _to_json(metric: Metric) -> list[Any]:
    samples = [
        [sample.name, sample.labels, sample.value, sample.exemplar and [*sample.exemplar]]
        for sample in metric.samples
    ]
    return [metric.name, metric.documentation, metric.type, metric.unit, samples]


def _from_json(fields: list[Any]) -> Metric:
    *about, samples = fields
    metric = Metric(*about)
    metric.samples = [
        Sample(name, labels, value, None, exemplar and Exemplar(*exemplar))
        for name, labels, value, exemplar in samples
    ]
    return metric
