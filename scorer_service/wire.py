"""How the messages of a conversation travel after Welcome: through its stream, or beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequestError
from outrider.rpc.data_connection import Offer
from outrider.rpc.feature_codec import SessionMessage, response_to_bytes
from outrider.rpc.frames import Frames
from outrider.v1 import draft_pb2

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[draft_pb2.DraftRequest]
_parse = draft_pb2.DraftRequest.FromString


@dataclass(frozen=True, slots=True)
class Wire:
    """Both ways of one conversation."""

    requests: Requests
    """Ends when the proposer closes its side or goes away. Raises `InvalidRequestError`."""
    write: Callable[[SessionMessage], Awaitable[None]]
    until_ended: Callable[[], Coroutine[Any, Any, None]]
    """Returns when the conversation is over although `requests` may not know. Raises what it is to
    end with."""


def through_stream(requests: Requests, context: Context) -> Wire:
    """As gRPC messages of the stream."""
    return Wire(requests, context.write, _never)


def through_frames(requests: Requests, offer: Offer) -> Wire:
    """Over the data connection of `offer`; the stream, whose `requests` these are, tells its end.

    Raises `InvalidRequestError` if the proposer has not opened it.
    """
    if not offer.connected.done():
        raise InvalidRequestError(
            "DataConnected.used without the connection", param="data_connected"
        )
    frames = offer.connected.result()

    async def write(message: SessionMessage) -> None:
        await frames.write(response_to_bytes(message))

    async def until_ended() -> None:
        if await anext(requests, None) is not None:
            raise InvalidRequestError("messages come through the data connection, since it is used")

    return Wire(_requests(frames), write, until_ended)


async def _never() -> None:
    await asyncio.Event().wait()


async def _requests(frames: Frames) -> Requests:
    while (data := await frames.read()) is not None:
        try:
            yield _parse(data)
        except DecodeError as error:
            raise InvalidRequestError("this is no DraftRequest") from error
