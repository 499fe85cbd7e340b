"""Calls from other threads to an engine's `HiddenStateStreams`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from outrider.engine.engine import Engine
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.features import FeatureSpec, FeatureWindow


class Push(Protocol):
    """Queues a command for the engine's thread; called under its lock."""

    def __call__(self, work: Callable[[Engine], None], *, wakes: bool = True) -> None: ...


class HiddenStateCommands:
    """Implements `HiddenStateControl`. A session's failure undoes none of the commands."""

    def __init__(self, lock: threading.Condition, push: Push) -> None:
        self._lock = lock
        self._push = push

    def give_back(self, window: FeatureWindow, size: int) -> None:
        """Return `size` bytes to a window.

        Wakes the engine's thread only if rows wait for them, since it would run Python while the
        event loop writes to proposers. The thread sets `short` before it takes the lock to sleep.
        """
        with self._lock:
            self._queue(lambda streams: streams.give_back(window, size), wakes=window.short)

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> Future[None]:
        """Keep a projection on the device; the future ends when it is there."""
        done: Future[None] = Future()

        def put(streams: HiddenStateStreams) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                streams.put_projection(spec, matrix)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            self._queue(put)
        return done

    def drop_projection(self, sha256: bytes) -> None:
        """Forget a projection that no proposer uses."""
        with self._lock:
            self._queue(lambda streams: streams.drop_projection(sha256))

    def _queue(self, work: Callable[[HiddenStateStreams], None], *, wakes: bool = True) -> None:
        def command(engine: Engine) -> None:
            if engine.features is not None:
                work(engine.features)

        self._push(command, wakes=wakes)
