"""Act once at the end of an event loop's turn on all that the turn left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class EndOfTurn(Generic[T]):
    """Calls a function with all that was added in a turn of the event loop, behind all else."""

    def __init__(self, act: Callable[[T], None]) -> None:
        self._act = act
        self._due: list[T] = []

    def add(self, item: T) -> None:
        """Act on it at the end of the turn. Used on the event loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(item)

    def _run(self) -> None:
        due, self._due = self._due, []
        for item in due:
            self._act(item)
