"""Input of the drafting thread: items of the event loop, and messages of its own connections."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import time
from typing import Final

from proposer_service.connection import Connection
from proposer_service.cycle import Attach, Batch, Detach, Item
from proposer_service.routes import LinkId

_POLL_S: Final = 1.0
_READ: Final = selectors.EVENT_READ
_READ_WRITE: Final = selectors.EVENT_READ | selectors.EVENT_WRITE


class Inbox:
    """Items from the event loop. All but `put` and the counts is for the drafting thread.

    A connection is read from when its Attach is taken until the Detach of its link is.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._connections: dict[LinkId, Connection] = {}
        self._watched: dict[LinkId, int] = {}  # selector events, by connection
        self._put_bytes = self._taken_bytes = 0  # of hidden states; each has one writer
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)

    def put(self, item: Item) -> None:
        """Queue an item and wake the thread."""
        self._put_bytes += item.feature_bytes if isinstance(item, Batch) else 0
        self._items.put(item)
        with contextlib.suppress(OSError):  # the thread is being woken already, or has ended
            self._waker.send(b"\0")

    @property
    def num_items(self) -> int:
        """Number of items that were not taken yet."""
        return self._items.qsize()

    @property
    def num_bytes(self) -> int:
        """Bytes of hidden states in these items."""
        return self._put_bytes - self._taken_bytes

    @property
    def is_empty(self) -> bool:
        """Return whether `take` would have to wait."""
        return not self._selector.select(0)

    def take(self, *, wait: bool) -> list[Item]:
        """Return all items and messages; wait for one if asked, within a limit."""
        for link, connection in self._connections.items():
            self._watch(link, connection)
        items: list[Item] = []
        for key, events in self._selector.select(_POLL_S if wait else 0):
            if key.data is None:
                self._woken.recv(4096)
                continue
            connection = self._connections[key.data]
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & _READ:
                arrived = time.perf_counter()
                items += [Batch(key.data, batch, arrived) for batch in connection.receive()]
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(item := self._items.get_nowait())
                if isinstance(item, Batch):
                    self._taken_bytes += item.feature_bytes
                elif isinstance(item, Attach) and item.connection is not None:
                    self._connections[item.link] = item.connection
                elif isinstance(item, Detach):
                    self._forget(item.link)
        return items

    def close(self) -> None:
        for link in list(self._connections):
            self._forget(link)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _watch(self, link: LinkId, connection: Connection) -> None:
        """Watch for the events that a connection can use: none once it failed."""
        events = 0 if connection.failed else _READ_WRITE if connection.has_unsent else _READ
        watched = self._watched.get(link, 0)
        if events == watched:
            return
        if not events:
            self._selector.unregister(connection)
        elif not watched:
            self._selector.register(connection, events, link)
        else:
            self._selector.modify(connection, events, link)
        self._watched[link] = events

    def _forget(self, link: LinkId) -> None:
        connection = self._connections.pop(link, None)
        if connection is None:
            return
        if self._watched.pop(link, 0):
            self._selector.unregister(connection)
        connection.close()
