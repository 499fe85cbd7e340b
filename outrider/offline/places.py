"""Bound the completions that the engine knows at once."""

from __future__ import annotations

import asyncio

from outrider.config import MAX_WAITING


class Places:
    """Bounds the completions that the engine knows, first come, first served."""

    def __init__(self, max_num_seqs: int) -> None:
        """Let as many wait as the engine works on at once, within its queue."""
        self._limit = min(2 * max_num_seqs, MAX_WAITING)
        self._taken = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def free(self, places: int) -> bool:
        """Return whether `take` would not wait."""
        waits = self._taken and self._taken + places > self._limit
        return not waits and not self._turn.locked()

    async def take(self, places: int) -> None:
        """Wait until there is room; more than the limit take all of it."""
        async with self._turn:
            while self._taken and self._taken + places > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self._taken += places

    def give_back(self, places: int) -> None:
        self._taken -= places
        self._freed.set()
