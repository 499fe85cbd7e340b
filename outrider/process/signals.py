"""What a signal does to a process that does not serve yet."""

from __future__ import annotations

import os
import signal


def end_at_sigterm() -> None:
    """Lets SIGTERM end this process at once, with exit code 143.

    It does so anyway, except in the first process of a container, which gets no signal that it has
    no handler for: a pod that was deleted while its modules were imported went on to serve, until
    it was killed. `KeyboardInterrupt` does the same for SIGINT.
    """
    signal.signal(signal.SIGTERM, lambda signum, _: os._exit(ended_by(signum)))


def ended_by(signum: int) -> int:
    """Return the exit code of a process that a signal ended before its work was done."""
    return 128 + signum
