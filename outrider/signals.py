"""SIGTERM, before an event loop has it."""

from __future__ import annotations

import os
import signal


def end_at_sigterm() -> None:
    """Lets SIGTERM end this process at once, with exit code 143.

    It does so anyway, except in the first process of a container, which gets no signal that it has
    no handler for: a pod that was deleted while its modules were imported went on to serve, until
    it was killed. `KeyboardInterrupt` does the same for SIGINT.
    """
    signal.signal(signal.SIGTERM, lambda signum, _: os._exit(128 + signum))
