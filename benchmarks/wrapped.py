"""Running a service that was changed first. For benchmarks only.

python -m benchmarks.WRAPPER scorer_service|proposer_service|gateway [the service's flags]
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def serve(change: Callable[[str], object]) -> NoReturn:
    """Run the service that the command line names until a signal; `change` is told its name."""
    service, *flags = sys.argv[1:]
    change(service)
    leave(importlib.import_module(f"{service}.__main__").main(flags))


def leave(exit_code: int) -> NoReturn:
    """End the process as the services do: not waiting for threads that still have torch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
