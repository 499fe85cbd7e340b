"""What services a gRPC server has and their messages (grpc.reflection.v1alpha)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

_SENDING_S = 1.0  # that a client has to take its last answer when its stream ends


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # it has no types
    """Tells of the services with these names.

    The streams of its base go on until their clients end them, so that a server with a single one
    takes its whole grace to stop. These end at `end`, even if a client does not read.
    """

    def __init__(self, *service_names: str) -> None:
        super().__init__((*service_names, reflection.SERVICE_NAME))
        self._streams: set[asyncio.Timeout] = set()
        self._limit_s: float | None = None

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        self._limit_s = None
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(self, server)

    def end(self) -> None:
        """End all streams, and from now on each new one at once."""
        self._limit_s = 0.0
        for stream in self._streams:
            stream.reschedule(0.0)

    async def ServerReflectionInfo(  # noqa: N802
        self, requests: AsyncIterable[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Answer requests one by one."""
        last: asyncio.Future[None] | None = None
        try:
            async with asyncio.timeout(self._limit_s) as stream:
                self._streams.add(stream)
                try:
                    async for answer in super().ServerReflectionInfo(requests, context):
                        last = asyncio.ensure_future(context.write(answer))
                        await asyncio.shield(last)
                finally:
                    self._streams.discard(stream)
        except TimeoutError:
            if last is not None:  # gRPC sends no status while it sends an answer
                await asyncio.wait([last], timeout=_SENDING_S)
