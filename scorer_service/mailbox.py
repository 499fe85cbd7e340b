"""Output of the engine on its way to the clients' streams. Used on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.types import Commit


class Mailbox:
    """Commits of one request that its stream has not written yet.

    After the first message, the stream gets at least `interval` tokens at a time until the end.
    """

    def __init__(self, interval: int = 0) -> None:
        self._interval = interval
        self._closed = False
        self._num_tokens = 0
        self._wanted = 0  # tokens of the next message
        self._commits: list[Commit] = []
        self._ready = asyncio.Event()
        self.error: Exception | None = None
        """The stream ends with it, after the commits."""
        self.on_ready: Callable[[], None] | None = None
        """Called once there is enough to take, for a stream that never waits in `take`."""

    def close(self) -> None:
        """Keep nothing from now on: nobody takes it."""
        self._closed = True

    def put(self, commit: Commit) -> None:
        """Take a commit, and let the stream take all once they are enough."""
        if self._closed:
            return
        self._commits.append(commit)
        if self._wanted:
            self._num_tokens += len(commit.token_ids)
            if self._num_tokens < self._wanted and commit.finish_reason is None:
                return
        self._tell()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, after the commits that came before."""
        self.error = error
        self._tell()

    async def take(self) -> list[Commit]:
        """Return all commits since the last call, once they are enough; raise the `fail` error."""
        await self._ready.wait()
        if not self._commits:
            assert self.error is not None, "else commits were what was told"
            raise self.error
        if self.error is None:
            self._ready.clear()
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

    def _tell(self) -> None:
        if self.on_ready is not None:
            self.on_ready()
        else:
            self._ready.set()
