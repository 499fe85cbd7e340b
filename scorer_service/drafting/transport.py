"""How the messages of a conversation travel after Welcome: through its stream, or beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequestError
from outrider.rpc.data_connection import Offer
from outrider.rpc.feature_codec import SessionMessage, response_to_bytes
from outrider.v1 import draft_pb2

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[draft_pb2.DraftRequest]
_parse = draft_pb2.DraftRequest.FromString


@dataclass(frozen=True, slots=True)
class Transport:
    """Both ways of one conversation."""

    requests: Callable[[], AsyncGenerator[draft_pb2.DraftRequest, None]]
    """To be closed. Ends when the proposer closes its side or goes away; raises
    `InvalidRequestError` for what is no request."""
    write: Callable[[SessionMessage], Awaitable[None]]


def through_stream(requests: Requests, context: Context) -> Transport:
    """As gRPC messages of the stream."""

    async def read() -> AsyncGenerator[draft_pb2.DraftRequest, None]:
        async for request in requests:
            yield request

    return Transport(read, context.write)


def through_frames(stream: Requests, offer: Offer) -> Transport:
    """Over the data connection of `offer`; the stream, whose requests are given, tells its end.

    Raises `InvalidRequestError` if the proposer has not opened it.
    """
    if not offer.connected.done():
        raise InvalidRequestError(
            "DataConnected.used without the connection", param="data_connected"
        )
    frames = offer.connected.result()

    async def watch() -> None:
        try:
            if await anext(stream, None) is not None:
                raise InvalidRequestError("a message in the stream beside the data connection")
        finally:
            frames.close()

    async def read() -> AsyncGenerator[draft_pb2.DraftRequest, None]:
        watching = asyncio.create_task(watch())
        try:
            while (data := await frames.read()) is not None:
                yield _parse(data)
                await asyncio.sleep(0)  # what has come is read without: others have their turn
            if watching.done():
                watching.result()
        except DecodeError as error:
            raise InvalidRequestError("this is no DraftRequest") from error
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def write(message: SessionMessage) -> None:
        await frames.write(response_to_bytes(message))

    return Transport(read, write)
