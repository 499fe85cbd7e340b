"""The life of a service process: start, a `ready` line, signals, a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import uvloop

from outrider.errors import OutriderError, refuse, say
from outrider.process.signals import ended_by, say_second
from outrider.rpc.logs import configure_logging

# Read on import, since the parent may die while torch is being imported.
_PARENT = os.getppid()
_PARENT_POLL_S = 0.2


class Service(Protocol):
    """The service that a process runs."""

    async def start(self) -> dict[str, str]:
        """Start, and return the addresses for the ready line. Raises any `OutriderError`."""

    async def stop(self) -> None:
        """Drain and release everything, also after a `start` that failed or was cancelled."""

    async def wait_failed(self) -> None:
        """Return once the service can no longer serve and the process should end."""


async def run_until_signal(name: str, service: Service, *, exit_with_parent: bool = False) -> int:
    """Run `service` until SIGTERM, SIGINT or, if asked, the parent's death.

    Prints `ready {"service": name, ...}` on stdout once it serves. Returns 0, or 1 if the service
    failed while serving, or 128 plus the signal's number if the service did not serve yet. The same
    signal again ends the process at once. Raises the errors of `start`, after `stop`.
    """
    stopping = asyncio.Event()
    seen: list[int] = []
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _on_signal, name, signum, seen, stopping)
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(stopping.wait())]
    if exit_with_parent:
        tasks.append(asyncio.create_task(_parent_gone(_PARENT)))
    starting = asyncio.create_task(service.start())
    try:
        await asyncio.wait([starting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            addresses = starting.result()
            say(f"ready {json.dumps({'service': name, **addresses})}", sys.stdout)
            failing = asyncio.create_task(service.wait_failed())
            tasks.append(failing)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return 1 if failing.done() and not stopping.is_set() else 0
        return ended_by(seen[0]) if seen else 0
    finally:
        for task in (starting, *tasks):
            task.cancel()
        await asyncio.gather(starting, *tasks, return_exceptions=True)
        await service.stop()


GC_THRESHOLDS: Final = (50_000, 10, 10)
"""Streams and drafts make and drop thousands of objects a step, hardly any in reference cycles.
With Python's default thresholds, looking for cycles takes a seventh of a gateway's time, and of a
proposer's."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collections, and exempt what was imported from later ones.

    Modules stay for the life of the process. Looking through all of them again and again takes a
    large part of the time in which a service starts.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def prepare_grpc() -> None:
    """Set the environment that grpc reads when it is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own errors are readable
    # Without its event engines, messages pass through one thread less. A grpc that lacks the
    # experiments says so on stderr and goes on.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def run(
    name: str,
    service: Service,
    *,
    exit_with_parent: bool = False,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> int:
    """Call `run_until_signal` in a new event loop, and return the exit code.

    An `OutriderError` becomes a line on stderr and exit code 2.
    """
    configure_logging(name)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(run_until_signal(name, service, exit_with_parent=exit_with_parent))
    except OutriderError as error:
        return refuse(name, error)


def progress(name: str, message: str) -> None:
    """Print a line about the start-up on stderr."""
    say(f"{name}: {message}")


def _on_signal(name: str, signum: int, seen: list[int], stopping: asyncio.Event) -> None:
    # Ctrl-C reaches the whole process group, and the parent may add a SIGTERM.
    if signum in seen:
        say_second(name, signum)
        os._exit(ended_by(signum))
    seen.append(signum)
    stopping.set()


async def _parent_gone(parent: int) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110  # portable, unlike prctl
        await asyncio.sleep(_PARENT_POLL_S)
