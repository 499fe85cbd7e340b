"""A stream to a scorer after Welcome: the transport of its messages, and its open sessions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from outrider.errors import OutriderError, UnavailableError
from outrider.rpc.frames import ENDED, FrameSocket
from outrider.rpc.tasks import first_of
from outrider.v1 import draft_pb2
from proposer_service.config import LinkConfig
from proposer_service.connection import Connection
from proposer_service.cycle import Attach, Batch, Detach, SendMessage
from proposer_service.drafting_thread import DraftingThread
from proposer_service.routes import LinkId

Call = grpc.aio.StreamStreamCall[Any, Any]
_QUEUE_FULL_WAIT_S: Final = 0.002
_STATUS_TIMEOUT_S: Final = 1.0  # where the stream is dead, too


@dataclass(frozen=True, slots=True)
class Welcomed:
    """A stream after Welcome, and the thread that drafts for it."""

    call: Call
    link: LinkId
    thread: DraftingThread
    config: LinkConfig
    max_block_tokens: int


class Conversation(ABC):
    """A stream to a scorer. Lives on the event loop, except for the drafting thread's callbacks."""

    def __init__(self, stream: Welcomed) -> None:
        self._stream = stream
        self._call = stream.call
        self._open: dict[int, int] = {}  # session -> epoch
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._ended = asyncio.Event()

    @property
    def num_sessions(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Draft for the scorer until it or the thread ends the conversation.

        Raises the error that it ended with, if any.
        """
        try:
            await first_of(self._run(), self._until_thread_ends())
        finally:
            self._stream.thread.put(Detach(self._stream.link))
            self._ended.set()

    async def until_unused(self) -> None:
        """Return when no session is open, or the conversation has ended."""
        await first_of(self._all_closed.wait(), self._ended.wait())

    async def say_goodbye(self) -> None:
        """Return when every session was closed and the scorer has ended the stream."""
        goodbye = draft_pb2.DraftRequest(goodbye=draft_pb2.Goodbye())
        self._stream.thread.put(SendMessage(self._stream.link, goodbye))
        await self.until_unused()
        await self._done_writing()
        await self._ended.wait()

    def _note(self, batch: draft_pb2.SessionBatch) -> None:
        """Count open sessions."""
        for opened in batch.opens:
            self._open[opened.session] = opened.epoch
        for closed in batch.closes:
            if self._open.get(closed.session) == closed.epoch:
                del self._open[closed.session]
        if self._open:
            self._all_closed.clear()
        else:
            self._all_closed.set()

    async def _until_thread_ends(self) -> None:
        await self._stream.thread.ended.wait()
        raise UnavailableError("the proposer stops")

    @abstractmethod
    async def _run(self) -> None: ...

    @abstractmethod
    async def _done_writing(self) -> None: ...


class Streamed(Conversation):
    """A conversation of gRPC messages, read and written on the loop."""

    def __init__(self, stream: Welcomed) -> None:
        super().__init__(stream)
        self._unsent: deque[draft_pb2.DraftRequest | None] = deque()  # None: nothing follows
        self._wake = asyncio.Event()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()

        def send(messages: Sequence[draft_pb2.DraftRequest]) -> None:
            loop.call_soon_threadsafe(self._put, messages)

        stream = self._stream
        stream.thread.put(Attach(stream.link, send, stream.max_block_tokens))
        await first_of(self._read_all(), self._write_all())

    async def _done_writing(self) -> None:
        self._put((None,))

    def _put(self, messages: Sequence[draft_pb2.DraftRequest | None]) -> None:
        self._unsent.extend(messages)
        self._wake.set()

    async def _read_all(self) -> None:
        stream = self._stream
        message: Any
        while (message := await self._call.read()) is not grpc.aio.EOF:
            if message.HasField("sessions"):
                self._note(message.sessions)
                # A full queue holds back the reader, and gRPC's flow control the scorer.
                while stream.thread.is_full:  # noqa: ASYNC110
                    await asyncio.sleep(_QUEUE_FULL_WAIT_S)
                size = sum(len(each.rows) for each in message.sessions.features)
                batch = Batch(stream.link, message.sessions, time.perf_counter(), size)
                stream.thread.put(batch)

    async def _write_all(self) -> None:
        """Write what is put until cancelled. Raises for a scorer that does not read."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsent:
                if len(self._unsent) > self._stream.config.max_unsent:
                    raise UnavailableError("the scorer does not read its blocks")
                message = self._unsent.popleft()
                if message is None:
                    await self._call.done_writing()
                    continue
                async with asyncio.timeout(self._stream.config.answer_timeout_s):
                    await write(self._call, message)


class Direct(Conversation):
    """A conversation over a data connection of the drafting thread, ended by the stream."""

    def __init__(self, stream: Welcomed, frames: FrameSocket) -> None:
        super().__init__(stream)
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[OutriderError] = loop.create_future()

        def on_sessions(batch: draft_pb2.SessionBatch) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._note, batch)

        def on_failure(error: OutriderError) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._failed.set_result, error)

        self._connection = Connection(frames, on_sessions, on_failure)

    async def _run(self) -> None:
        stream, connection = self._stream, self._connection
        attach = Attach(stream.link, connection.send, stream.max_block_tokens, connection)
        stream.thread.put(attach)
        status = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait((status, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if status.done():
                status.result()
                return
            error = self._failed.result()
            if error.reason == ENDED:
                # The reason comes through the stream. Closing this side ends the stream also where
                # the scorer does not know that the connection broke.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STATUS_TIMEOUT_S):
                        await self._call.done_writing()
                        await status
            raise error
        finally:
            status.cancel()

    async def _done_writing(self) -> None:
        await self._call.done_writing()


async def write(call: Call, message: draft_pb2.DraftRequest) -> None:
    """Write a message, or raise the status with which the scorer has ended the stream."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError as error:  # the stream has ended
        if await call.code() is grpc.StatusCode.OK:
            raise UnavailableError("the scorer ended the stream") from error
        await call.read()  # raises the status
        raise UnavailableError("the stream broke") from error
