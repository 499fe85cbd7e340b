"""A service whose telemetry can be switched while it runs. For benchmarks only.

python -m benchmarks.switched scorer_service|proposer_service|gateway [the service's flags]

It starts with everything on; `MODES` says which signal switches to what. It drafts as `fixed_k`
does, so that it does the same rounds in every mode.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

from opentelemetry.sdk.trace.sampling import Decision, ParentBased, SamplingResult
from prometheus_client import Counter, Gauge, Histogram

MODES: Final = {
    "muted": signal.SIGRTMIN,  # counts nothing, traces nothing
    "metrics": signal.SIGRTMIN + 1,
    "traces": signal.SIGRTMIN + 2,  # and metrics
}
_COUNTING = ((Counter, ("inc",)), (Gauge, ("inc", "dec", "set")), (Histogram, ("observe",)))
_mode = "traces"


def main(argv: list[str]) -> int:
    """Runs until a signal; returns the exit code."""
    module, *flags = argv
    for mode, number in MODES.items():
        signal.signal(number, functools.partial(_switch, mode))
    for instrument, methods in _COUNTING:
        for method in methods:
            _patch(instrument, method)
    mock.patch.object(ParentBased, "should_sample", _should_sample).start()
    if module == "scorer_service":
        from benchmarks.fixed_k import fix
        from scorer_service.metrics import ScorerMetrics

        fix()
        _patch(ScorerMetrics, "observe_step")
    run = importlib.import_module(f"{module}.__main__").main
    code: int = run(flags)
    return code


def _switch(mode: str, *_: object) -> None:
    global _mode
    _mode = mode


def _patch(owner: type, method: str) -> None:
    original: Callable[..., None] = getattr(owner, method)

    @functools.wraps(original)
    def unless_muted(*args: Any, **kwargs: Any) -> None:
        if _mode != "muted":
            original(*args, **kwargs)

    mock.patch.object(owner, method, unless_muted).start()


_sample = ParentBased.should_sample


def _should_sample(self: ParentBased, *args: Any, **kwargs: Any) -> SamplingResult:
    if _mode == "traces":
        return _sample(self, *args, **kwargs)
    return SamplingResult(Decision.DROP)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # as the services do
