"""An established stream to a scorer: what waits to be written, and which sessions are open."""

from __future__ import annotations

import asyncio
from collections import deque

from outrider.errors import UnavailableError
from outrider.v1 import draft_pb2
from proposer_service.config import LinkConfig
from proposer_service.wire import Wire


class Stream:
    """Lives on the event loop."""

    def __init__(self, wire: Wire, config: LinkConfig) -> None:
        self.wire = wire
        self.ended = asyncio.Event()
        self._config = config
        self._unsent: deque[draft_pb2.DraftRequest | None] = deque()  # None: nothing follows
        self._wake = asyncio.Event()
        self._open: dict[int, int] = {}  # session -> epoch
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @property
    def num_sessions(self) -> int:
        return len(self._open)

    def put(self, messages: list[draft_pb2.DraftRequest]) -> None:
        """Queues messages; called on the loop."""
        self._unsent.extend(messages)
        self._wake.set()

    async def write_all(self) -> None:
        """Writes what is put, until cancelled. Raises for a scorer that does not read."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsent:
                if len(self._unsent) > self._config.max_unsent:
                    raise UnavailableError("the scorer does not read its blocks")
                message = self._unsent.popleft()
                if message is None:
                    await self.wire.done_writing()
                    continue
                async with asyncio.timeout(self._config.answer_timeout_s):
                    await self.wire.write(message)

    def note(self, batch: draft_pb2.SessionBatch) -> None:
        """Keeps count of open sessions."""
        for opened in batch.opens:
            self._open[opened.session] = opened.epoch
        for closed in batch.closes:
            if self._open.get(closed.session) == closed.epoch:
                del self._open[closed.session]
        if self._open:
            self._all_closed.clear()
        else:
            self._all_closed.set()

    async def until_unused(self) -> None:
        """Returns when no session is open, or the stream has ended."""
        closed = asyncio.create_task(self._all_closed.wait())
        ended = asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait([closed, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            ended.cancel()

    async def say_goodbye(self) -> None:
        """Returns when every session was closed and the scorer has ended the stream."""
        self.put([draft_pb2.DraftRequest(goodbye=draft_pb2.Goodbye())])
        await self.until_unused()
        self._unsent.append(None)
        self._wake.set()
        await self.ended.wait()
