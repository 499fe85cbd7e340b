"""Calls under way in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.openai.requests import Request
from outrider.offline.feed import Feed
from outrider.offline.outputs import ABORTED, CompletionOutput, RequestOutput
from outrider.offline.params import RequestOutputKind

STOP_S: Final = 10.0
"""How long what is closed, or cancelled, may take to end."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request and how its outputs come."""

    body: Request
    request_id: str
    prompt: str | None
    kind: RequestOutputKind

    def aborted(self, number: int) -> RequestOutput:
        """Return the output of a request that was aborted before it began."""
        given = getattr(self.body, "prompt", "")  # a chat's is not tokenised yet
        outputs = [
            CompletionOutput(index, "", [], finish_reason=ABORTED)
            for index in range(self.body.n or 1)
        ]
        return RequestOutput(
            self.request_id,
            self.prompt,
            [] if isinstance(given, str) else list(given),
            outputs,
            finished=True,
            index=number,
        )


class Run:
    """Requests under way."""

    def __init__(self, calls: Sequence[Call], feed: Feed, on_loop: Callable[..., None]) -> None:
        """`on_loop` calls a function on the event loop, from any thread."""
        self._on_loop = on_loop
        self._ended = threading.Event()
        self.calls = calls
        self.feed = feed
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self.aborted = False
        self.begun: set[int] = set()  # numbers of the calls that have outputs of their own

    def cancel(self, *, abort: bool = False) -> None:
        """End the requests; with `abort`, their last outputs say so. On any thread."""
        if not self._ended.is_set():
            self._on_loop(self._cancel, abort)

    def wait(self) -> None:
        """Return when nothing of the requests is left."""
        self._ended.wait(STOP_S)

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes. On the event loop."""
        self._ended.set()
        self.feed.end(error)

    def _cancel(self, abort: bool) -> None:
        self.cancelled = True
        self.aborted |= abort
        if self.task is not None:
            self.task.cancel()
