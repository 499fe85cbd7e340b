"""A service that counts nothing, and drafts as `fixed_k` does. For benchmarks only.

python -m benchmarks.muted scorer_service|proposer_service|gateway [the service's flags]
"""

from __future__ import annotations

import importlib
import os
import sys
from unittest import mock

from prometheus_client import Counter, Gauge, Histogram

_MUTED = ((Counter, ("inc",)), (Gauge, ("inc", "dec", "set")), (Histogram, ("observe",)))


def main(argv: list[str]) -> int:
    """Runs until a signal; returns the exit code."""
    module, *flags = argv
    for instrument, methods in _MUTED:
        for method in methods:
            mock.patch.object(instrument, method, _nothing).start()
    if module == "scorer_service":
        from benchmarks.fixed_k import fix
        from scorer_service.metrics import ScorerMetrics

        fix()
        mock.patch.object(ScorerMetrics, "observe_step", _nothing).start()
    run = importlib.import_module(f"{module}.__main__").main
    code: int = run(flags)
    return code


def _nothing(*_args: object, **_kwargs: object) -> None:
    pass


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # as the services do
