"""Services as child processes of one supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn, Self

from outrider.cli.client import why_not_attached
from outrider.cli.process import START_DEADLINE_S, STOP_GRACE_S
from outrider.errors import ConfigError, InternalError, OutriderError, ProposerRefusedError
from outrider.process.child_process import (
    Relay,
    ServiceProcess,
    ServiceSpec,
    describe_exit,
    stop_all,
)
from outrider.rpc.tasks import all_or_first_error

_ATTACH_DEADLINE_S = 15.0
_ANSWER_DEADLINE_S = 15.0
_RESTART_BACKOFF_S = 0.2
_RESTART_BACKOFF_MAX_S = 10.0
# An optional service that lived this long starts over with the shortest backoff.
_HEALTHY_AFTER_S = 30.0


class Stack:
    """Services that run together. An async context manager: leaving it stops them all."""

    def __init__(self, specs: Sequence[ServiceSpec], relay: Relay) -> None:
        self._relay = relay
        self._specs = specs
        self._services: dict[str, ServiceProcess] = {}
        self._ready: dict[str, dict[str, str]] = {}

    @property
    def ready(self) -> Mapping[str, Mapping[str, str]]:
        """The contents of the services' ready lines, by name."""
        return self._ready

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the services that run."""
        return {name: each.pid for name, each in self._services.items() if each.started}

    async def __aenter__(self) -> Self:
        try:
            starts = [self._new(spec).start(START_DEADLINE_S) for spec in self._specs]
            for spec, said in zip(self._specs, await all_or_first_error(starts), strict=True):
                self._ready[spec.name] = said
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait_for_proposer(self) -> None:
        """Return once the scorer has its proposer, if there is to be one.

        A bounded time, because requests are served without it, too. Raises `ConfigError` if the
        scorer refuses it: that would not change.
        """
        if "proposer" not in self._ready:
            return
        deadline = time.monotonic() + _ATTACH_DEADLINE_S
        address, answer_s = self._ready["proposer"]["grpc"], _ANSWER_DEADLINE_S
        try:
            while why := await why_not_attached(address, timeout_s=answer_s):
                if time.monotonic() >= deadline:
                    self._relay("outrider", f"no speculation, the proposer is not attached: {why}")
                    return
                await asyncio.sleep(0.05)
        except ProposerRefusedError as error:
            raise ConfigError(
                f"the scorer refused the proposer: {error.message}. Name another --draft-model, or "
                "draft without a model: --method ngram."
            ) from error

    async def supervise(self) -> NoReturn:
        """Restart optional services that end. Raises `InternalError` when another one does."""
        watches = [
            self._restart(spec) if spec.optional else self._raise_at_end(spec)
            for spec in self._specs
        ]
        await all_or_first_error(watches)
        raise AssertionError("each watch ends with an exception")

    async def stop(self) -> None:
        """Stop all as `stop_all` does."""
        await stop_all(self._services.values(), STOP_GRACE_S, STOP_GRACE_S)
        self._services.clear()

    def _new(self, spec: ServiceSpec) -> ServiceProcess:
        service = self._services[spec.name] = ServiceProcess(spec, self._relay)
        return service

    async def _raise_at_end(self, spec: ServiceSpec) -> NoReturn:
        code = await self._services[spec.name].wait()
        raise InternalError(
            f"the {spec.name} ended with {describe_exit(code)}, so everything stops; its last "
            "lines above may say why."
        )

    async def _restart(self, spec: ServiceSpec) -> NoReturn:
        backoff_s = _RESTART_BACKOFF_S
        started = time.monotonic()
        while True:
            code = await self._services[spec.name].wait()
            if time.monotonic() - started > _HEALTHY_AFTER_S:
                backoff_s = _RESTART_BACKOFF_S
            self._relay(
                spec.name,
                f"ended with {describe_exit(code)}; requests go on without speculation; "
                f"restarting it in {backoff_s:g} s",
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _RESTART_BACKOFF_MAX_S)
            service = self._new(spec)
            started = time.monotonic()
            try:
                await service.start(START_DEADLINE_S)
            except OutriderError as error:
                self._relay(spec.name, error.message)
                service.kill()
            else:
                self._relay(spec.name, "is back")
