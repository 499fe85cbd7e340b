"""The transport of a conversation after Welcome: its stream, or a data connection."""

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
    """Both directions of one conversation."""

    requests: Callable[[], AsyncGenerator[draft_pb2.DraftRequest, None]]
    """The caller closes it. It ends when the proposer closes its side or goes away, and raises
    `InvalidRequestError` for a message that is no request."""
    write: Callable[[SessionMessage], Awaitable[None]]


def through_stream(requests: Requests, context: Context) -> Transport:
    """Return the stream itself, whose messages are gRPC's."""

    async def read() -> AsyncGenerator[draft_pb2.DraftRequest, None]:
        async for request in requests:
            yield request

    return Transport(read, context.write)


def through_frames(stream: Requests, offer: Offer) -> Transport:
    """Return the data connection of `offer`, which ends with the stream.

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
                await asyncio.sleep(0)  # frames that have come are read without a pause
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
