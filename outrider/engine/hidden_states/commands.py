"""What is asked of an engine's `HiddenStateStreams` from outside of its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from outrider.engine.engine import Engine
from outrider.features import FeatureSpec, FeatureWindow


class Push(Protocol):
    """Queues a command for the engine's thread; under its lock."""

    def __call__(self, work: Callable[[Engine], None], *, wakes: bool = True) -> None: ...


class HiddenStateCommands:
    """Thread-safe; its methods never wait for a step. No session's failure undoes them."""

    def __init__(self, lock: threading.Condition, push: Push) -> None:
        self._lock = lock
        self._push = push

    def give_back(self, window: FeatureWindow, size: int) -> None:
        """So many bytes of features were read, or are of no use any more: others may follow.

        Wakes the thread only if others wait for that: it would run Python while the event loop
        writes what a proposer waits for.
        """

        def command(engine: Engine) -> None:
            if engine.features is not None:
                engine.features.give_back(window, size)

        with self._lock:
            # The thread notes that something waits before it takes this lock to sleep.
            self._push(command, wakes=window.short)

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> Future[None]:
        """Keep a projection on the device; done when it is there, or with what was raised."""
        done: Future[None] = Future()

        def command(engine: Engine) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                assert engine.features is not None, "checked with Hello"
                engine.features.put_projection(spec, matrix)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            self._push(command)
        return done

    def drop_projection(self, sha256: bytes) -> None:
        """Forgets a projection that no proposer uses."""

        def command(engine: Engine) -> None:
            if engine.features is not None:
                engine.features.drop_projection(sha256)

        with self._lock:
            self._push(command)
