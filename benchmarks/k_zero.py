"""A service whose policy never drafts: proposers merely follow. For benchmarks only.

python -m benchmarks.k_zero scorer_service|proposer_service|gateway [the service's flags]
"""

from __future__ import annotations

import importlib
import os
import sys
from unittest import mock

from outrider.engine.contest import Contest


def main(argv: list[str]) -> int:
    """Runs until a signal; returns the exit code."""
    module, *flags = argv
    mock.patch.object(Contest, "drafting", new=False).start()
    run = importlib.import_module(f"{module}.__main__").main
    code: int = run(flags)
    return code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # as the services do
