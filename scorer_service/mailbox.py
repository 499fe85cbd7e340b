"""Output of the engine on its way to the clients' streams. Used on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from outrider.types import Commit

_DELIVERED_AT_ONCE: Final = 8
"""Messages to clients that the event loop writes before it reads messages of proposers."""


class Mailbox:
    """Commits of one request that its stream has not written yet.

    After the first message, the stream gets at least `interval` tokens at a time until the end.
    """

    def __init__(self, interval: int = 0) -> None:
        self._interval = interval
        self._num_tokens = 0
        self._wanted = 0  # tokens of the next message
        self._commits: list[Commit] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def put(self, commit: Commit) -> None:
        self._commits.append(commit)
        self._num_tokens += len(commit.token_ids)
        if self._num_tokens >= self._wanted or commit.finish_reason is not None:
            self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, after the commits that came before."""
        self._error = error
        self._wake.set()

    async def take(self) -> list[Commit]:
        """Return all commits since the last call, once they are enough; raise the `fail` error."""
        await self._wake.wait()
        if not self._commits and self._error is not None:
            raise self._error
        if self._error is None:
            self._wake.clear()
        commits, self._commits = self._commits, []
        self._num_tokens, self._wanted = 0, self._interval
        return commits


class Deliveries:
    """The commits of a step, put into mailboxes a few at a time.

    Drafts for the next step may arrive before all clients were written to. The engine waits for
    those drafts, so the event loop reads them in between.
    """

    def __init__(self) -> None:
        self._left: deque[tuple[Mailbox, Commit]] = deque()

    def put(self, mailbox: Mailbox, commit: Commit) -> None:
        self._left.append((mailbox, commit))

    def deliver(self) -> None:
        """Deliver the first commits now, and the others after the loop has read."""
        self._deliver(min(_DELIVERED_AT_ONCE, len(self._left)))
        if self._left:
            asyncio.get_running_loop().call_soon(self.deliver)

    def finish(self) -> None:
        """Deliver all that is left."""
        self._deliver(len(self._left))

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            mailbox, commit = self._left.popleft()
            mailbox.put(commit)
