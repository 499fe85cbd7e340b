"""Answers requests that do not parse with INVALID_ARGUMENT.

grpc.aio would log a traceback and answer UNKNOWN.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequestError
from outrider.rpc.status import abort

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a request that does not parse, until the call can be aborted."""

    reason: str

    @property
    def error(self) -> InvalidRequestError:
        """Return what the call ends with."""
        return InvalidRequestError(f"The request does not parse: {self.reason}.")


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Aborts calls with a single request if the request does not parse.

    Streams of requests find an `Unreadable` in its place if their deserializer is `tolerant`.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            _guarded(handler.unary_stream or handler.unary_unary),
            request_deserializer=tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that gives an `Unreadable` for bytes that do not parse."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, ValueError) as error:
            return Unreadable(str(error))

    return read


def _guarded(behavior: Callable[..., Any]) -> Callable[[Any, _Context], Any]:
    if inspect.isasyncgenfunction(behavior):

        async def stream(request: Any, context: _Context) -> AsyncGenerator[Any, None]:
            await _refuse_unreadable(request, context)
            async for response in behavior(request, context):
                yield response

        return stream

    async def call(request: Any, context: _Context) -> Any:
        await _refuse_unreadable(request, context)
        return await behavior(request, context)

    return call


async def _refuse_unreadable(request: Any, context: _Context) -> None:
    if isinstance(request, Unreadable):
        await abort(context, request.error)
