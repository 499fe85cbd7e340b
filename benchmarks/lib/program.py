"""Exit codes and progress lines of the programs that start other processes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from benchmarks.lib.processes import ProcessError
from benchmarks.lib.prompts import PromptsError
from outrider.errors import OutriderError


def guarded(measure: Callable[[], int]) -> int:
    """Return the exit code of `measure`, or 2 if it could not run.

    The reason is printed to stderr. SIGTERM unwinds `measure`, so that children are stopped.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        return measure()
    except (ProcessError, OutriderError, PromptsError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2


def arguments(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m module` whose help shows the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def say(message: str) -> None:
    """Print progress to stderr."""
    print(message, file=sys.stderr, flush=True)


def _end(*_: object) -> NoReturn:
    raise SystemExit(143)
