"""What services a gRPC server has and their messages (grpc.reflection.v1alpha)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # it has no types
    """Tells of the services with these names.

    The streams of its base go on until their clients end them, so that a server with a single one
    takes its whole grace to stop. These end at `end`, even if a client does not read.
    """

    def __init__(self, *service_names: str) -> None:
        super().__init__((*service_names, reflection.SERVICE_NAME))
        self._streams: set[asyncio.Timeout] = set()

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(self, server)

    def end(self) -> None:
        """End all streams. Stop the server right after it, since new ones would last again."""
        for stream in self._streams:
            stream.reschedule(0.0)

    async def ServerReflectionInfo(  # noqa: N802
        self, requests: AsyncIterable[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Answer requests one by one."""
        try:
            async with asyncio.timeout(None) as stream:
                self._streams.add(stream)
                try:
                    async for answer in super().ServerReflectionInfo(requests, context):
                        await context.write(answer)
                finally:
                    self._streams.discard(stream)
        except TimeoutError:
            return
