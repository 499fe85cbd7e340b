"""Writing gRPC answers with one turn of a call's task per message, and all of a step at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from outrider.end_of_turn import EndOfTurn


class Writes:
    """Writes the messages of a call in order, and waits for each only before the next one.

    To wait at once would give the call's task a second turn for every message. A client that does
    not read still stops the call: one message is under way at most. The first message is waited
    for: before the metadata that goes with it, a call cannot be aborted. An async context manager;
    its end waits for the last message, but not after an error.

    A `burst` begins the writes of a turn of the event loop together. gRPC's polling thread wakes
    for each write that ends. It finds more of them at a time where they follow at once, and
    otherwise takes the core from the event loop for every message.
    """

    def __init__(
        self, write: Callable[[bytes], Coroutine[Any, Any, None]], burst: EndOfTurn[Writes]
    ) -> None:
        self._write = write
        self._burst = burst
        self._due: bytes | None = None
        self._writing: Coroutine[Any, Any, None] | None = None
        self._waits_for: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    async def add(self, message: bytes) -> None:
        """Write a message. Raises what `write` raised for the one before it."""
        first = self._writing is None
        if not first:
            await self._written()
        self._due = message
        if first:
            await self._written()
        else:
            self._burst.add(self)

    def begin(self) -> None:
        """Begin to write the message that is due, if it is not begun."""
        message, self._due = self._due, None
        if message is not None:
            self._writing = self._write(message)
            self._go_on(self._writing)

    @property
    def ready(self) -> bool:
        """Tell whether `add_now` may be called: the message before has been written."""
        if self._writing is None or self._due is not None:
            return False
        while (future := self._waits_for) is not None:
            if not future.done():
                return False
            self._go_on(self._writing)
        return self._error is None

    def add_now(self, message: bytes) -> None:
        """Write a message, if `ready`."""
        self._due = message
        self._burst.add(self)

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
            return
        self.begin()
        if (future := self._waits_for) is not None and self._writing is not None:
            if future.done():
                self._go_on(self._writing)
            # Nobody asks for what becomes of it.
            future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._writing.close()

    async def _written(self) -> None:
        self.begin()
        while (future := self._waits_for) is not None and self._writing is not None:
            if not future.done():
                await asyncio.wait([future])
            self._go_on(self._writing)
        if self._error is not None:
            raise self._error

    def _go_on(self, writing: Coroutine[Any, Any, None]) -> None:
        """Run the write up to the next future that it waits for, or to its end."""
        self._waits_for = None
        try:
            self._waits_for = writing.send(None)
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:
            self._error = error
