"""The parent of a gateway's workers holds the ports, and restarts workers that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gateway.config import GatewayConfig
from gateway.ports import bind
from gateway.processes import Worker
from gateway.workers.metrics import retire
from gateway.workers.shared import SharedCounts
from outrider.errors import OutriderError, say
from outrider.process.child_process import ServiceProcess, ServiceSpec, describe_exit, stop_all
from outrider.process.temporary import run_folder, temporary_folder
from outrider.rpc.tasks import Background, all_or_first_error

_LOAD_S: Final = 600.0
"""For a worker to start, beside the time that it waits for a scorer: it may download a tokenizer.
"""
_STOP_S: Final = 3.0  # beside the grace
_BACKOFF_S, _BACKOFF_MAX_S = 0.2, 10.0
_HEALTHY_AFTER_S: Final = 30.0
_MOST_FAILURES: Final = 8
"""Ends of one worker in a row, none of which had been healthy: then the gateway ends, too."""
_LOOK_S: Final = 1.0
_HANGS_AFTER: Final = 30
"""Looks, not seconds, since a machine that is paused has none."""
_log = logging.getLogger(__name__)


class Workers:
    """`outrider.rpc.runtime.Service`: a gateway of several processes.

    `argv` are the flags of this process. The workers get them, too, with the ports that were found
    for a 0.
    """

    def __init__(self, config: GatewayConfig, argv: Sequence[str]) -> None:
        self._config = config
        self._argv = tuple(argv)
        self._kept = contextlib.ExitStack()
        self._reserved: dict[str, socket.socket] = {}
        self._processes: dict[int, ServiceProcess] = {}
        self._watches = Background()
        self._failed = asyncio.Event()
        self._started = False

    async def start(self) -> dict[str, str]:
        """Start every worker, and return the addresses. Raises `OutriderError`."""
        self._reserve_ports()
        self._place = Path(self._kept.enter_context(run_folder(temporary_folder())))
        self._counts = SharedCounts.create(self._place, self._config.workers)
        indices = range(self._config.workers)
        said = await all_or_first_error([self._start(index) for index in indices])
        self._started = True
        for index in indices:
            self._watches.start(self._watch(index))
        return {**said[0], "workers": str(self._config.workers)}

    async def stop(self) -> None:
        """Let the workers drain; what has not ended by the end of their grace is killed."""
        await self._watches.cancel()
        grace_s = self._config.deployment.drain_grace_s + _STOP_S
        await stop_all(self._processes.values(), grace_s, _STOP_S)
        self._kept.close()

    async def wait_failed(self) -> None:
        await self._failed.wait()

    def _reserve_ports(self) -> None:
        """Bind the ports without listening: nobody else may, and a 0 becomes a number."""
        config = self._config
        for flag, port in (
            ("--http-port", config.http_port),
            ("--grpc-port", config.grpc_port),
            ("--metrics-port", config.metrics_port),
            ("--health-port", config.deployment.health_port),
        ):
            if port is not None:
                bind(config.host, port).close()  # refused where a stranger's gateway shares it
                reserved = self._kept.enter_context(bind(config.host, port, share=True))
                self._reserved[flag] = reserved

    def _spec(self, index: int) -> ServiceSpec:
        worker = Worker(index, self._config.workers, os.getpid(), self._place)
        ports = [
            text
            for flag, reserved in self._reserved.items()
            for text in (flag, str(reserved.getsockname()[1]))
        ]
        python = (sys.executable, *(("-P",) if sys.flags.safe_path else ()), "-m", "gateway")
        return ServiceSpec(
            f"worker {index}",
            (*python, *self._argv, *ports, "--exit-with-parent", "--worker", f"{worker}"),
        )

    async def _start(self, index: int) -> dict[str, str]:
        process = ServiceProcess(self._spec(index), self._relay)
        self._processes[index] = process
        return await process.start(self._config.start_timeout_s + _LOAD_S)

    def _relay(self, name: str, line: str) -> None:
        """Show what a worker says; at the start they all say the same."""
        if self._started or name == "worker 0":
            say(line)

    async def _watch(self, index: int) -> None:
        """Start a worker again whenever it ends, later and later; give up at last."""
        failures, backoff_s, began = 0, _BACKOFF_S, time.monotonic()
        while True:
            code = await self._ended(index)
            self._counts.clear(index)
            retire(self._place, index)
            if time.monotonic() - began > _HEALTHY_AFTER_S:
                failures, backoff_s = 0, _BACKOFF_S
            failures += 1
            said = describe_exit(code)
            if failures >= _MOST_FAILURES:
                _log.error("worker %d ended with %s again: the gateway ends, too", index, said)
                self._failed.set()
                return
            _log.error("worker %d ended with %s; restarting it in %g s", index, said, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
            began = time.monotonic()
            try:
                await self._start(index)
            except (OutriderError, OSError) as error:  # or no memory for another process
                _log.error("%s", error)
                self._processes[index].kill()
            else:
                _log.info("worker %d is back", index)

    async def _ended(self, index: int) -> int:
        """Return the exit code of a worker, and kill it if its event loop does not run."""
        process = self._processes[index]
        if not process.started:
            return os.EX_OSERR
        ended = asyncio.create_task(process.wait())
        try:
            looks, beats = 0, self._counts.beats(index)
            while not (await asyncio.wait({ended}, timeout=_LOOK_S))[0]:
                before, beats = beats, self._counts.beats(index)
                looks = looks + 1 if beats == before else 0
                if looks == _HANGS_AFTER:
                    _log.error("worker %d hangs: it is killed", index)
                    process.kill()
            return ended.result()
        finally:
            ended.cancel()
