"""Receives requests a bounded number at a time.

Before any of our code runs, gRPC receives the request of a call whole: of as many calls at once as
clients care to make. With this interceptor a call that has not its turn stays in its connection's
flow-control window, which all calls of the connection share.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc

from outrider.errors import CapacityError, DeadlineError, InvalidRequestError
from outrider.rpc.status import abort

AT_ONCE: Final = 64
"""Requests; each of at most `channel.MAX_MESSAGE_BYTES`."""
TIMEOUT_S: Final = 30.0
"""For its turn, and again for all of it to come."""

Context = grpc.aio.ServicerContext[Any, Any]


class BoundedReceiving(grpc.aio.ServerInterceptor):
    """Of calls with one request and a stream of answers."""

    def __init__(self, at_once: int = AT_ONCE, timeout_s: float = TIMEOUT_S) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._timeout_s = timeout_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_stream is None:
            return handler

        async def answer(requests: AsyncIterator[Any], context: Context) -> None:
            try:
                request = await self._receive(requests)
            except Exception as error:
                await abort(context, error)
            answers = handler.unary_stream(request, context)
            if not inspect.isasyncgen(answers):
                await answers
                return
            async with aclosing(answers):
                async for each in answers:
                    await context.write(each)

        return grpc.stream_stream_rpc_method_handler(
            answer, handler.request_deserializer, handler.response_serializer
        )

    async def _receive(self, requests: AsyncIterator[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            raise CapacityError("Too many requests are being received. Try again later.") from None
        try:
            async with asyncio.timeout(self._timeout_s):
                request = await anext(requests, None)
        except TimeoutError:
            raise DeadlineError(f"The request did not come within {self._timeout_s:g} s.") from None
        finally:
            self._turns.release()
        if request is None:
            raise InvalidRequestError("The call ended without a request.")
        return request
