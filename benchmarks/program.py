"""What the programs that start other processes share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from benchmarks.processes import ProcessError
from benchmarks.prompts import PromptsError
from outrider.errors import OutriderError


def guarded(measure: Callable[[], int]) -> int:
    """The exit code: what `measure` returns, or 2 if it could not run, with the reason on stderr.

    SIGTERM unwinds it, so that children are stopped on the way out.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        return measure()
    except (ProcessError, OutriderError, PromptsError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2


def say(message: str) -> None:
    """Progress, on stderr."""
    print(message, file=sys.stderr, flush=True)


def _end(*_: object) -> NoReturn:
    raise SystemExit(143)
