"""Writing a gRPC answer with one turn of its task per message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self


class Writes:
    """Writes the messages of a call in order, and waits for each only before the next one.

    To wait at once would give the call's task a second turn for every message. A client that does
    not read still stops the call: one message is under way at most. The first message is waited
    for: before the metadata that goes with it, a call cannot be aborted. An async context manager;
    its end waits for the last message, but not after an error.
    """

    def __init__(self, write: Callable[[bytes], Coroutine[Any, Any, None]]) -> None:
        self._write = write
        self._writing: Coroutine[Any, Any, None] | None = None  # the last one
        self._waits_for: asyncio.Future[None] | None = None  # None: nothing is being written

    async def add(self, message: bytes) -> None:
        """Begin to write a message. Raises what `write` raised for the one before it."""
        if self._waits_for is not None:
            await self._written()
        first = self._writing is None
        self._writing = writing = self._write(message)
        self._go_on(writing)
        if first:
            await self._written()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            await self._written()
        elif (future := self._waits_for) is not None:
            assert self._writing is not None
            if future.done():
                with contextlib.suppress(Exception):
                    self._go_on(self._writing)
            # Nobody asks for what becomes of it.
            future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._writing.close()

    async def _written(self) -> None:
        while (future := self._waits_for) is not None:
            assert self._writing is not None
            if not future.done():
                await asyncio.wait([future])
            self._go_on(self._writing)

    def _go_on(self, writing: Coroutine[Any, Any, None]) -> None:
        """Run the write up to the next future that it waits for, or to its end."""
        self._waits_for = None
        try:  # noqa: SIM105  # once a message, and faster
            self._waits_for = writing.send(None)
        except StopIteration:
            pass
