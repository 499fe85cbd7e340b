"""Output of the engine on its way to the clients' streams. Used on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
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
        self._woken = asyncio.Event()
        self.error: Exception | None = None
        """The stream ends with it, after the commits."""
        self.on_ready: Callable[[], None] | None = None
        """Called, in the place of waking `take`, once there is enough to take."""

    def put(self, commit: Commit) -> bool:
        """Take a commit; return whether the stream has enough to write, and is to be woken."""
        self._commits.append(commit)
        self._num_tokens += len(commit.token_ids)
        return self._num_tokens >= self._wanted or commit.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, after the commits that came before."""
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Let the stream take what is there."""
        if self.on_ready is not None:
            self.on_ready()
        else:
            self._woken.set()

    async def take(self) -> list[Commit]:
        """Return all commits since the last call, once they are enough; raise the `fail` error."""
        await self._woken.wait()
        while not self._commits:
            if self.error is not None:
                raise self.error
            self._woken.clear()  # it took before what it was woken for
            await self._woken.wait()
        if self.error is None:
            self._woken.clear()
        return self.take_some(len(self._commits))

    def take_some(self, most: int) -> list[Commit]:
        """Return the first commits since the last call, at most so many, without waiting."""
        commits, self._commits = self._commits, []
        if len(commits) > most:
            commits, self._commits = commits[:most], commits[most:]
        self._num_tokens, self._wanted = 0, self._interval
        return commits

    @property
    def holds_commits(self) -> bool:
        """Return whether commits are left."""
        return bool(self._commits)


class Deliveries:
    """The streams that a step's commits wake, a few at a time.

    Drafts for the next step may arrive before all clients were written to. The engine waits for
    those drafts, so the event loop reads them in between. What one stream carries for many requests
    is written at once, and what waits for more tokens is not written yet.
    """

    def __init__(self) -> None:
        self._left: deque[Mailbox] = deque()

    def put(self, mailbox: Mailbox, commit: Commit) -> None:
        if not mailbox.put(commit):
            return
        if mailbox.on_ready is not None:
            mailbox.on_ready()
        else:
            self._left.append(mailbox)

    def deliver(self) -> None:
        """Wake the first streams now, and the others after the loop has read."""
        self._wake(min(_DELIVERED_AT_ONCE, len(self._left)))
        if self._left:
            asyncio.get_running_loop().call_soon(self.deliver)

    def finish(self) -> None:
        """Wake all that are left."""
        self._wake(len(self._left))

    def _wake(self, count: int) -> None:
        for _ in range(count):
            self._left.popleft().wake()
