"""Health of a gRPC server (grpc.health.v1)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Answer = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Answers for the services whose state was `set`; the name "" is the whole process.

    The watches of `grpc_health.v1.health` go on until their clients end them, so that a server
    with a single one takes its whole grace to stop. These end after `end_watches`.
    """

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._ended = self._watches_end = False

    def set(self, serving: Mapping[str, bool]) -> None:
        """Set the state of services, and tell whoever watches them. Has no effect after `end`."""
        if not self._ended:
            self._serving.update(serving)
            self._changed.set()
            self._changed = asyncio.Event()

    def end(self) -> None:
        """Say NOT_SERVING for all services from now on."""
        self.set(dict.fromkeys(self._serving, False))
        self._ended = True

    def end_watches(self) -> None:
        """Let the watches end when they have told the state.

        Stop the server right after it: clients begin an ended watch anew at once.
        """
        self._watches_end = True
        self._changed.set()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        """Answer at once; NOT_FOUND for a service that is not here."""
        if request.service not in self._serving:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"the services here are {sorted(self._serving)}"
            )
        return _Answer(status=self._status(request.service))

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802
        """Tell the state now and at each change."""
        told = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != told:
                await context.write(_Answer(status=status))
                told = status
            elif self._watches_end:
                return
            else:
                await changed.wait()

    def _status(self, service: str) -> Any:
        if service not in self._serving:
            return _Answer.SERVICE_UNKNOWN
        return _Answer.SERVING if self._serving[service] else _Answer.NOT_SERVING
