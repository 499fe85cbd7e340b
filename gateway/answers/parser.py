"""An answer's events from its text, in any pieces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gateway.answers.events import Arguments, Call, Content, Event
from gateway.answers.formats import Reading
from gateway.answers.reader import Parse, Reader
from gateway.answers.thinking import read_thinking


class AnswerParser:
    """Reads one answer. Malformed calls are text; nothing raises."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._reader = Reader(trims=bool(reading.tools))
        self._calls = 0
        self._begins: list[int] = []  # of the tokens, within the text
        self._chars = 0
        self._parse = self._whole()
        next(self._parse)

    def feed(self, text: str) -> list[Event]:
        """Return the events that a piece of the text made certain."""
        self._reader.push(text)
        next(self._parse)
        return self._wanted(self._reader.take())

    def finish(self) -> list[Event]:
        """Return the rest of the events: the text has ended.

        What may still have become a call is text then, but markup where there can be only calls.
        """
        self._reader.end()
        next(self._parse, None)
        self._reader.close()
        rest = self._wanted(self._reader.take())
        if self._reading.only_calls:
            return [event for event in rest if not isinstance(event, Content)]
        return rest

    def read(self, texts: Sequence[str], *, last: bool) -> list[Event]:
        """Return the events that tokens with these texts made certain; `last`: the answer ends."""
        for text in texts:
            self._begins.append(self._chars)
            self._chars += len(text)
        events = self.feed("".join(texts))
        return events + self.finish() if last else events

    @property
    def reasoning_tokens(self) -> int:
        """Count the tokens that began within reasoning, of those that were `read`."""
        begins = self._begins
        return sum(
            bisect_left(begins, end) - bisect_left(begins, begin)
            for begin, end in self._reader.thoughts
        )

    def _wanted(self, events: list[Event]) -> list[Event]:
        if not self._reading.one_call:
            return events
        wanted = []
        for event in events:
            self._calls += isinstance(event, Call)
            if self._calls < 2 or not isinstance(event, Call | Arguments):
                wanted.append(event)
        return wanted

    def _whole(self) -> Parse[None]:
        reader, reading = self._reader, self._reading
        yield
        if reading.marks is not None:
            yield from read_thinking(reader, reading.marks, is_open=reading.thinks)
        if reading.calls is not None:
            yield from reading.calls(reader, reading.tools)
        yield from reader.until([], reader.content)
