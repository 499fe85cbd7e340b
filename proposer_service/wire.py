"""How the messages of a conversation travel after Welcome: through its stream, or beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import ConfigError, InvalidRequestError, UnavailableError
from outrider.rpc.data_connection import connect
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.frames import Frames
from outrider.rpc.targets import Target
from outrider.v1 import draft_pb2

_log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 2.0
"""A port that a firewall hides does not answer at all, and every dial waits for it."""

Call = grpc.aio.StreamStreamCall[Any, Any]
_parse = draft_pb2.DraftResponse.FromString


class Wire(Protocol):
    """Both ways of one conversation. One task may read and one write at a time."""

    async def read(self) -> draft_pb2.DraftResponse | None:
        """None: the scorer has ended the conversation well. Else raises its status."""

    async def write(self, message: draft_pb2.DraftRequest) -> None:
        """Raises its status if the scorer has ended the conversation."""

    async def done_writing(self) -> None:
        """Nothing follows."""

    def close(self) -> None:
        """What it holds beside the stream is let go."""


class StreamWire:
    """gRPC messages of the stream."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> draft_pb2.DraftResponse | None:
        message: Any = await self._call.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, message: draft_pb2.DraftRequest) -> None:
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError as error:  # ended meanwhile: the status says why
            if await self._call.code() is grpc.StatusCode.OK:
                raise UnavailableError("the scorer ended the stream") from error
            await self._call.read()  # raises the status
            raise UnavailableError("the stream broke") from error

    async def done_writing(self) -> None:
        await self._call.done_writing()

    def close(self) -> None:
        """It holds nothing else."""


class FrameWire:
    """A data connection; the stream, on which nothing comes any more, tells how it all ends."""

    def __init__(self, call: Call, frames: Frames, answer_timeout_s: float) -> None:
        self._call = call
        self._frames = frames
        self._answer_timeout_s = answer_timeout_s
        self._end = asyncio.create_task(self._watch())

    async def read(self) -> draft_pb2.DraftResponse | None:
        data = await self._frames.read()
        if data is None:
            await self._ended()
            return None
        try:
            return _parse(data)
        except DecodeError as error:
            raise InvalidRequestError("the scorer sent what is no DraftResponse") from error

    async def write(self, message: draft_pb2.DraftRequest) -> None:
        try:
            await self._frames.write(message.SerializeToString())
        except OSError as error:
            await self._ended()
            raise UnavailableError("the scorer ended the stream") from error

    async def done_writing(self) -> None:
        await self._call.done_writing()

    def close(self) -> None:
        self._end.cancel()
        self._frames.close()

    async def _watch(self) -> None:
        try:
            await self._call.read()
        finally:
            self._frames.close()

    async def _ended(self) -> None:
        """Raises the stream's status if it is none that is well."""
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                await asyncio.shield(self._end)
        except TimeoutError:
            raise UnavailableError("the data connection broke") from None


async def open_wire(
    call: Call,
    target: Target,
    welcome: draft_pb2.Welcome,
    tls: TlsFiles | None,
    answer_timeout_s: float,
) -> Wire:
    """The data connection that Welcome offers, if there is one and it can be reached."""
    stream = StreamWire(call)
    if not welcome.HasField("data_connection"):
        return stream
    frames: Frames | None = None
    try:
        frames = await connect(target, welcome.data_connection, tls, _CONNECT_TIMEOUT_S)
    except (OSError, ConfigError) as error:
        why = str(error) or "it does not answer"
        _log.warning("scorer %s: no data connection, which is slower: %s", target, why)
    with contextlib.ExitStack() as cleanup:
        if frames is not None:
            cleanup.callback(frames.close)
        connected = draft_pb2.DataConnected(used=frames is not None)
        async with asyncio.timeout(answer_timeout_s):
            await stream.write(draft_pb2.DraftRequest(data_connected=connected))
        cleanup.pop_all()
    return stream if frames is None else FrameWire(call, frames, answer_timeout_s)
