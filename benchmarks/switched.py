"""A service whose telemetry can be switched while it runs. For benchmarks only.

python -m benchmarks.switched scorer_service|proposer_service|gateway [the service's flags]

`MODES` says which signal switches to what; it starts with everything on. Each switch sends off the
spans that wait to be exported, so that no mode pays for another. The scorer does the same work in
every mode: it drafts as `fixed_k` does, and its rows go in step, all of them or none.
"""

from __future__ import annotations

import functools
import math
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final
from unittest import mock

from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import Counter, Gauge, Histogram

from benchmarks.wrapped import serve
from outrider.rpc.latency import LatencyMetrics


@dataclass(frozen=True)
class Mode:
    """How much telemetry there is."""

    signal: int
    counts: bool
    traced: float  # share of requests


MODES: Final = {
    "muted": Mode(signal.SIGRTMIN, counts=False, traced=0.0),
    "default": Mode(signal.SIGRTMIN + 1, counts=True, traced=0.01),  # as in the Helm chart
    "all": Mode(signal.SIGRTMIN + 2, counts=True, traced=1.0),
}
STEPS: Final = "steps_done"
"""A gauge: steps of the scorer so far, counted in every mode."""

_COUNTING: Final = (
    (Counter, "inc"),
    (Gauge, "inc"),
    (Gauge, "dec"),
    (Gauge, "set"),
    (Histogram, "observe"),
    (LatencyMetrics, "record"),
)
Method = Callable[..., None]


class Switch:
    """What a signal switches in this process. Made before the service."""

    def __init__(self) -> None:
        # Replaced, not wrapped: a wrapper would cost as much as what it lets through.
        self._methods: list[tuple[type, str, Method, Method]] = [
            (owner, name, getattr(owner, name), _nothing) for owner, name in _COUNTING
        ]
        self._batches: list[BatchSpanProcessor] = []
        start = BatchSpanProcessor.__init__

        def started(batch: BatchSpanProcessor, *args: Any, **kwargs: Any) -> None:
            start(batch, *args, **kwargs)
            self._batches.append(batch)

        mock.patch.object(BatchSpanProcessor, "__init__", started).start()
        self._sample = ParentBased.should_sample
        for mode in MODES.values():
            signal.signal(mode.signal, functools.partial(self._to, mode))

    def steady_scorer(self) -> None:
        """Has the scorer do the same steps in every mode, and count them. Imports torch."""
        from benchmarks.fixed_k import fix
        from outrider.engine.policy.waiting import Waiting
        from scorer_service.metrics import ScorerMetrics

        fix()
        mock.patch.object(Waiting, "start_at", return_value=math.inf).start()
        observe, steps = ScorerMetrics.observe_step, 0

        def only_steps(metrics: ScorerMetrics, *_: Any) -> None:
            nonlocal steps
            if not steps:
                metrics.watch(STEPS, "Steps.", lambda: steps)
            steps += 1

        def everything(metrics: ScorerMetrics, *args: Any) -> None:
            only_steps(metrics)
            observe(metrics, *args)

        mock.patch.object(ScorerMetrics, "observe_step", everything).start()
        self._methods.append((ScorerMetrics, "observe_step", everything, only_steps))

    def _to(self, mode: Mode, _number: int, _frame: FrameType | None) -> None:
        for owner, name, counting, muted in self._methods:
            setattr(owner, name, counting if mode.counts else muted)
        sampler = ParentBased(TraceIdRatioBased(mode.traced))
        setattr(ParentBased, "should_sample", functools.partial(self._sample, sampler))  # noqa: B010
        for batch in self._batches:  # in threads: this one may be in the middle of anything
            threading.Thread(target=batch.force_flush, daemon=True).start()


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _change(service: str) -> None:
    switch = Switch()
    if service == "scorer_service":
        switch.steady_scorer()


if __name__ == "__main__":
    serve(_change)
