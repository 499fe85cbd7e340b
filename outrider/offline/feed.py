"""Outputs on their way from the event loop to the program that asked for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from gateway.generation import Chunk
from outrider.offline.outputs import RequestOutput, Tracker


class Feed:
    """Holds what a reader has not read; a late reader gets several chunks as one output.

    The event loop writes, and one other thread reads.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called, on any thread, whenever there is something to read."""
        self._wake = wake
        self._changed = threading.Condition()
        self._ready: dict[Callable[[], RequestOutput], None] = {}  # in order
        self._ended = False
        self._error: BaseException | None = None

    def add(self, tracker: Tracker, index: int, chunk: Chunk) -> None:
        """Add a chunk of a request's completion `index`."""
        with self._changed:
            if tracker.add(index, chunk):
                self._put(tracker.take)

    def abort(self, tracker: Tracker) -> None:
        """End a request before its end."""
        with self._changed:
            tracker.abort()
            self._put(tracker.take)

    def add_last(self, output: RequestOutput) -> None:
        """Add the only output of a request that has not begun."""
        with self._changed:
            self._put(lambda: output)

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes; `error` is why, unless all requests have ended."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify()
        self._wake()

    def take(self) -> tuple[list[RequestOutput], bool]:
        """Return what has come, and whether more may come.

        Raises the error that ended the feed once all before it was read.
        """
        with self._changed:
            outputs = [take() for take in self._ready]
            self._ready.clear()
            if self._ended and self._error is not None:
                if not outputs:
                    raise self._error
                self._wake()  # the next call raises
            return outputs, not self._ended or self._error is not None

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield all outputs as they come."""
        more = True
        while more:
            with self._changed:
                while not self._ready and not self._ended:
                    self._changed.wait()
            outputs, more = self.take()
            yield from outputs

    def _put(self, take: Callable[[], RequestOutput]) -> None:
        self._ready[take] = None
        self._changed.notify()
        self._wake()
