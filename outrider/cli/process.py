"""Messages and signals of commands that run services as children."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Final

from outrider.errors import say
from outrider.process.signals import ended_by, say_second

STOP_GRACE_S: Final = 1.0
"""Time between SIGTERM and SIGKILL. Ctrl-C then ends everything in under 2 s."""
START_DEADLINE_S: Final = 900.0
"""Time in which a large model is read, and kernels are compiled and chosen."""


def relay(name: str, line: str) -> None:
    """Show one line of a service on stderr."""
    line = line.removeprefix(name).removeprefix(":").lstrip()  # it says its name itself
    say(f"{name:<8} | {line}")


def run_until_signal(command: Coroutine[object, object, int]) -> int:
    """Run a command; SIGINT, SIGTERM and SIGHUP cancel it, which stops what it started.

    SIGHUP stays ignored where it was, as by nohup. Returns the command's exit code, or 128 plus the
    number of the first signal if that ended the command.
    """

    async def body() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(command)
        seen: list[int] = []

        def on_signal(number: int) -> None:
            if number in seen:
                say_second("outrider", number)
            seen.append(number)
            task.cancel()

        outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *(() if outlives else (signal.SIGHUP,))):
            loop.add_signal_handler(number, on_signal, number)
        try:
            return await task
        except asyncio.CancelledError:
            return ended_by(seen[0])

    return asyncio.run(body())
