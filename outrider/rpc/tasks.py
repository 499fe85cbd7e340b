"""Coroutines that end together, and work on threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def first_of(*work: Coroutine[Any, Any, object]) -> None:
    """Run all until one ends, and then ends the others. Raises what one of them raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run it on a daemon thread of its own: an exit does not wait for it, nor can it be cancelled.

    Its result is had on an event loop by `asyncio.wrap_future`, and without one, too.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, daemon=True).start()
    return future
