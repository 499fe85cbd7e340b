"""Signals that end a process before its work is done."""

from __future__ import annotations

import os
import signal

from outrider.errors import say


def end_at_sigterm() -> None:
    """Let SIGTERM end this process at once, with exit code 143.

    It does so anyway, except in the first process of a container, which gets no signal that it has
    no handler for: a pod that was deleted while its modules were imported went on to serve, until
    it was killed. `KeyboardInterrupt` does the same for SIGINT.
    """
    signal.signal(signal.SIGTERM, lambda signum, _: os._exit(ended_by(signum)))


def say_second(name: str, signum: int) -> None:
    """Say on stderr why a process ends without the grace that its first signal gave it."""
    say(f"{name}: a second {signal.Signals(signum).name} ends everything at once, answers too")


def ended_by(signum: int) -> int:
    """Return the exit code of a process that a signal ended before its work was done."""
    return 128 + signum
