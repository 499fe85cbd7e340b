"""A worker's part in what its gateway's workers share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry

from gateway.processes import Worker
from gateway.workers.metrics import WorkerMetrics
from gateway.workers.shared import HELD, SharedCounts

_BEAT_S: Final = 1.0


class Membership:
    """The shared counts and metrics of one worker."""

    def __init__(self, worker: Worker, registry: CollectorRegistry) -> None:
        self.counts = SharedCounts.of(worker)
        self._metrics = WorkerMetrics(registry, worker)
        self.shown = CollectorRegistry()
        """The metrics of all workers."""
        self.shown.register(self._metrics)

    async def tell(self, held: Callable[[], int]) -> None:
        """Tell the others once a second how this worker stands, and its parent that it runs."""
        while True:
            self.counts.beat()
            self.counts.tell(HELD, held())
            self._metrics.save()
            await asyncio.sleep(_BEAT_S)

    def leave(self) -> None:
        """Write down what this worker has counted, as its last act."""
        self._metrics.save()
