"""Ask the draft side in vLLM's worker for the accounts of requests that ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

_TIMEOUT_S: Final = 2.0
_log = logging.getLogger(__name__)
Stats = dict[str, Any]


class Accounts:
    """Gathers what is asked in one turn of the event loop into one call, which costs a step."""

    def __init__(self, ask: Callable[[Sequence[str]], Awaitable[dict[str, Stats]]]) -> None:
        self._ask = ask
        self._wanted: dict[str, asyncio.Future[Stats | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def ask(self, name: str) -> Stats | None:
        """Return the fields of `RequestStats`; None if the draft side does not tell in time."""
        loop = asyncio.get_running_loop()
        self._wanted[name] = answer = loop.create_future()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._answer())
        try:
            return await asyncio.wait_for(answer, _TIMEOUT_S)
        except TimeoutError:
            return None

    async def _answer(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, {}
            try:
                told = await asyncio.wait_for(self._ask(tuple(wanted)), _TIMEOUT_S)
            except Exception as error:
                _log.warning("no accounts of drafts: %r", error)
                told = {}
            for name, answer in wanted.items():
                if not answer.done():
                    answer.set_result(told.get(name))
