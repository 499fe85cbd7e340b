"""The shape of a request's answer in one API, and that of chats and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from gateway.generation import Chunk, Ending
from gateway.openai.choices import Completion, Shaper, Shown, event
from gateway.openai.deltas import MessageReader
from gateway.openai.errors import error_body
from outrider.errors import OutriderError

KEEP_ALIVE: Final = b": waiting\n\n"


class EventStream(Protocol):
    """The events of one streamed answer."""

    keep_alive: bytes
    """Sent where nothing else is for long."""

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return the events that a chunk of a completion adds, maybe none."""

    def error(self, error: OutriderError) -> bytes:
        """Return the events that end a stream which has begun."""


class Rendering(Protocol):
    """Builds one request's answer."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed; `completions` prompt by prompt."""

    def stream(self) -> EventStream:
        """Begin the events of a streamed answer."""


class Choices:
    """Chats and completions: choices, whole or as events."""

    def __init__(self, shaper: Shaper, completions: int) -> None:
        """Take the number of completions that are generated."""
        self._shaper = shaper
        self._completions = completions

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._shaper.whole(completions)

    def stream(self) -> EventStream:
        return _ChoiceEvents(self._shaper, self._completions)


class _ChoiceEvents:
    keep_alive = KEEP_ALIVE

    def __init__(self, shaper: Shaper, completions: int) -> None:
        self._shaper = shaper
        self._completions = completions
        self._shown: dict[int, Shown] = {}  # of each choice
        self._readers: dict[int, MessageReader | None] = {}
        self._endings: dict[int, Ending] = {}

    def piece(self, index: int, chunk: Chunk) -> bytes:
        shaper, data = self._shaper, b""
        if index not in self._shown:
            self._readers[index] = shaper.reader()
            data = shaper.opening(index)
        before, reader = self._shown.get(index, Shown()), self._readers[index]
        data += shaper.piece(index, chunk, before, reader)
        self._shown[index] = before.and_then(chunk)
        if chunk.ending is not None:
            self._endings[index] = chunk.ending
            last = len(self._endings) == self._completions
            ordered = [self._endings[n] for n in sorted(self._endings)]
            called = reader is not None and reader.called
            data += shaper.end_of_choice(
                index, chunk.ending, ordered if last else None, called=called
            )
            if last:
                readers = filter(None, self._readers.values())
                data += shaper.end(ordered, sum(each.reasoning_tokens for each in readers))
        return data

    def error(self, error: OutriderError) -> bytes:
        return event(error_body(error))
