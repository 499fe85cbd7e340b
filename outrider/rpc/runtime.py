"""The life of a service process: start, one `ready` line, signals, a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from typing import Protocol

import uvloop

from outrider.errors import OutriderError

# Read at once, not when the service starts: the parent may die while torch is being imported.
_PARENT = os.getppid()
_PARENT_POLL_S = 0.2
EXIT_CONFIG = 2


class Service(Protocol):
    """What a process runs."""

    async def start(self) -> dict[str, str]:
        """Comes up; returns the addresses for the ready line. May raise any `OutriderError`."""
        ...

    async def stop(self) -> None:
        """Drains and releases everything; also after a `start` that failed or was cancelled."""
        ...

    async def wait_failed(self) -> None:
        """Return only if the service can no longer serve and the process should end."""
        ...


async def run_until_signal(name: str, service: Service, *, exit_with_parent: bool = False) -> int:
    """Run `service` until SIGTERM or SIGINT (or, if asked, the parent's death).

    Prints `ready {"service": name, ...}` on stdout once it serves. Returns the exit code: 0, or 1
    if the service failed while serving. The same signal again ends the process at once.
    What `start` raises is raised here, after `stop`.
    """
    stopping = asyncio.Event()
    seen: set[int] = set()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _on_signal, signum, seen, stopping)
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(stopping.wait())]
    if exit_with_parent:
        tasks.append(asyncio.create_task(_parent_gone(_PARENT)))
    starting = asyncio.create_task(service.start())
    failed = False
    try:
        await asyncio.wait([starting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            addresses = starting.result()
            with contextlib.suppress(BrokenPipeError):
                print(f"ready {json.dumps({'service': name, **addresses})}", flush=True)
            failing = asyncio.create_task(service.wait_failed())
            tasks.append(failing)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failed = failing.done() and not stopping.is_set()
        return 1 if failed else 0
    finally:
        for task in (starting, *tasks):
            task.cancel()
        await asyncio.gather(starting, *tasks, return_exceptions=True)
        await service.stop()


def prepare_grpc() -> None:
    """Set what grpc reads from the environment when it is imported, so call it before."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own errors say it readably
    # Without its event engines messages pass through one thread less: a fifth less time there and
    # back on uvloop, and of CPU time. A grpc without this choice says so on stderr and goes on.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def run(name: str, service: Service, *, exit_with_parent: bool = False) -> int:
    """`run_until_signal` in a new event loop; a start-up error becomes one line on stderr.

    Returns the exit code: 2 for an `OutriderError`.
    """
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"{name} %(levelname)s %(message)s"
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_until_signal(name, service, exit_with_parent=exit_with_parent))
    except OutriderError as error:
        print(f"{name}: {error.message}", file=sys.stderr, flush=True)
        return EXIT_CONFIG


def progress(name: str, message: str) -> None:
    """One readable line on stderr about how start-up is going."""
    print(f"{name}: {message}", file=sys.stderr, flush=True)


def _on_signal(signum: int, seen: set[int], stopping: asyncio.Event) -> None:
    # Ctrl-C reaches the whole process group, and the parent may add a SIGTERM: not impatience.
    if signum in seen:
        os._exit(128 + signum)
    seen.add(signum)
    stopping.set()


async def _parent_gone(parent: int) -> None:
    # Portable, unlike prctl; a call takes a microsecond.
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(_PARENT_POLL_S)
