"""Scorer, proposer and gateway as child processes of one supervisor."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from outrider.cli.client import why_not_attached
from outrider.cli.process import Relay, ServiceProcess
from outrider.cli.specs import (
    HOST,
    START_DEADLINE_S,
    STOP_GRACE_S,
    WITHOUT_DRAFT_MODEL,
    StackConfig,
    check_tokenizers,
    gateway_spec,
    proposer_spec,
    scorer_spec,
)
from outrider.errors import ConfigError, InternalError, OutriderError, ProposerRefusedError

T = TypeVar("T")

_ATTACH_DEADLINE_S = 15.0
_ANSWER_DEADLINE_S = 15.0
_RESTART_BACKOFF_S = 0.2
_RESTART_BACKOFF_MAX_S = 10.0
# A proposer that lived this long starts over with the shortest backoff.
_HEALTHY_AFTER_S = 30.0
_IN_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running stack answers."""

    http: str  # http://host:port
    grpc: str  # host:port
    metrics: dict[str, str] = field(default_factory=dict)  # service name -> URL


class Stack:
    """The three services. An async context manager: leaving it stops them, whatever happened."""

    def __init__(self, config: StackConfig, relay: Relay) -> None:
        self._config = config
        self._relay = relay
        self._scorer_address = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the scorer's socket
        self._proposer_address = ""
        self._essential: list[ServiceProcess] = []  # their end is the end of the stack
        self._proposer: ServiceProcess | None = None
        self._endpoints: Endpoints | None = None

    @property
    def endpoints(self) -> Endpoints:
        assert self._endpoints is not None, "started"
        return self._endpoints

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the services that run."""
        return {service.name: service.pid for service in self._services()}

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def wait_for_proposer(self) -> None:
        """Return once the scorer has its proposer, if there is to be one.

        A bounded time, because requests are served without it, too. Raises `ConfigError` if the
        scorer refuses it: that would not change.
        """
        if self._proposer is None:
            return
        deadline = time.monotonic() + _ATTACH_DEADLINE_S
        address, answer_s = self._proposer_address, _ANSWER_DEADLINE_S
        try:
            while why := await why_not_attached(address, timeout_s=answer_s):
                if time.monotonic() >= deadline:
                    self._relay("outrider", f"no speculation, the proposer is not attached: {why}")
                    return
                await asyncio.sleep(0.05)
        except ProposerRefusedError as error:
            raise ConfigError(
                f"the scorer refused the proposer: {error.message}. {WITHOUT_DRAFT_MODEL}"
            ) from error

    async def supervise(self) -> NoReturn:
        """Restarts the proposer when it ends. Raises `InternalError` when another service does."""
        watches: list[Coroutine[object, object, NoReturn]] = [
            _raise_at_end(service) for service in self._essential
        ]
        if self._proposer is not None:
            watches.append(self._keep_proposer(self._proposer))
        await _all_or_first_error(watches)
        raise AssertionError("each watch ends with an exception")

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL by id to those that have not ended within the grace.

        Cancelling it, as a second Ctrl-C does, ends the grace.
        """
        services = self._services()
        ends = [asyncio.create_task(service.wait()) for service in services]
        try:
            for service in services:
                service.terminate()
            if ends:
                await asyncio.wait(ends, timeout=STOP_GRACE_S)
        finally:
            for service in services:
                service.kill()
        if ends:
            await asyncio.wait(ends, timeout=STOP_GRACE_S)
        self._essential, self._proposer = [], None
        if self._folder is not None:
            self._folder.cleanup()

    def _services(self) -> list[ServiceProcess]:
        known = [*self._essential, *([self._proposer] if self._proposer else [])]
        return [service for service in known if service.started]

    async def _start(self) -> None:
        config = self._config = with_free_ports(self._config)
        check_port(config.http_port, "--http-port")
        check_port(config.grpc_port, "--grpc-port")
        check_tokenizers(config)
        # Chosen here, so that all three can load at the same time.
        scorer_port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-", dir=memory_folder())
        socket_path = f"{self._folder.name}/scorer.sock"
        self._scorer_address = f"unix:{socket_path}"
        scorer = ServiceProcess(scorer_spec(config, scorer_port, socket_path), self._relay)
        self._essential = [scorer]
        starts = [scorer.start(START_DEADLINE_S), self._start_gateway(f"{HOST}:{scorer_port}")]
        if config.methods and not config.in_process:
            self._proposer = self._new_proposer()
            starts.append(self._proposer.start(START_DEADLINE_S))
        scorer_ready, gateway_ready, *proposer_ready = await _all_or_first_error(starts)
        metrics = {"scorer": scorer_ready.get("metrics", "")}
        if proposer_ready:
            metrics["proposer"] = proposer_ready[0].get("metrics", "")
            self._proposer_address = proposer_ready[0].get("grpc", "")
        self._endpoints = Endpoints(gateway_ready["http"], gateway_ready["grpc"], metrics)

    async def _start_gateway(self, scorer_address: str) -> dict[str, str]:
        """Start the gateway and return the fields of its ready line.

        Another stack may have taken the free ports first; then other ports are tried.
        """
        while True:
            gateway = ServiceProcess(gateway_spec(self._config, scorer_address), self._relay)
            self._essential = [*self._essential[:1], gateway]
            try:
                return await gateway.start(START_DEADLINE_S)
            except ConfigError:
                config = with_free_ports(self._config)
                if config == self._config:
                    raise
                self._config = config

    def _new_proposer(self) -> ServiceProcess:
        return ServiceProcess(proposer_spec(self._config, self._scorer_address), self._relay)

    async def _keep_proposer(self, proposer: ServiceProcess) -> NoReturn:
        backoff_s = _RESTART_BACKOFF_S
        started = time.monotonic()
        while True:
            code = await proposer.wait()
            if time.monotonic() - started > _HEALTHY_AFTER_S:
                backoff_s = _RESTART_BACKOFF_S
            self._relay(
                proposer.name,
                f"ended with {describe_exit(code)}; requests go on without speculation; "
                f"restarting it in {backoff_s:g} s",
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _RESTART_BACKOFF_MAX_S)
            proposer = self._proposer = self._new_proposer()
            started = time.monotonic()
            try:
                await proposer.start(START_DEADLINE_S)
            except OutriderError as error:
                self._relay(proposer.name, error.message)
                proposer.kill()
            else:
                self._relay(proposer.name, "is back")


def check_port(port: int, flag: str) -> None:
    """Raise `ConfigError` if a port that was asked for is taken. 0 always passes."""
    if port and not _port_is_free(port):
        raise ConfigError(f"port {port} on {HOST} is taken: choose another {flag}, or 0 for any.")


def with_free_ports(config: StackConfig) -> StackConfig:
    """With 0 (any) for ports that are taken, of those that nobody asked for."""
    http_port, grpc_port = (
        0 if port in config.unasked_ports and not _port_is_free(port) else port
        for port in (config.http_port, config.grpc_port)
    )
    return replace(config, http_port=http_port, grpc_port=grpc_port)


def memory_folder() -> str | None:
    """For the socket between scorer and proposer, beside which hidden states go through files.

    None where there is none in memory: while gigabytes of a model are written back to a disk,
    whoever writes a file there is held up.
    """
    return _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None


def free_port() -> int:
    """Find a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def describe_exit(code: int) -> str:
    """Put an exit status into words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a connection in TIME_WAIT does not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


async def _raise_at_end(service: ServiceProcess) -> NoReturn:
    code = await service.wait()
    raise InternalError(f"the {service.name} ended with {describe_exit(code)}")


async def _all_or_first_error(jobs: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Results in order, or the first error as soon as there is one; none runs on after that."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
