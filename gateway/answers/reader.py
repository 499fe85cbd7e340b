"""The text of an answer as parsers read it: forwards, with one place to go back to.

Parsers are generators over a `Reader`. They yield where they need more text, and decide by the
characters alone, never by where the pieces of the text ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Final, TypeVar

from gateway.answers.events import Arguments, Call, Content, Event, Reasoning
from gateway.stop_strings import begun

T = TypeVar("T")
Parse = Generator[None, None, T]
Sink = Callable[[str], None]

END: Final = ""
MAX_NAME_CHARS: Final = 256
_NOT_IN_NAMES: Final = frozenset("\n{}[]<>\"'")
SPACE: Final = " \t\r\n"


class Reader:
    """The text so far, and the events that were found in it.

    With `trims`, white space beside tool calls is markup: content neither begins nor ends with it.
    """

    def __init__(self, *, trims: bool) -> None:
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters before `_text`
        self.thoughts: list[tuple[int, int]] = []
        """Where reasoning begins and ends in the whole text; its marks are not part of it."""
        self._mark: int | None = None
        self._ended = False
        self._trims = trims
        self.called = False  # whether a call has begun
        self._said = False
        self._space = ""  # of content, which waits for what follows
        self._thought = ""  # line breaks of reasoning, likewise
        self._thinks = False
        self._events: list[Event] = []
        self._kind: type[Content | Reasoning | Arguments] = Content
        self._pieces: list[str] = []  # of the event under way, of that kind

    # For the parser's owner.

    def push(self, text: str) -> None:
        """Append text."""
        drop = self._at if self._mark is None else self._mark
        self._text = self._text[drop:] + text
        self._at -= drop
        self._dropped += drop
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """Nothing more will be pushed."""
        self._ended = True

    def close(self) -> None:
        """Release white space that waits for more text: there is none."""
        if not self.called:
            self._add(Content, self._space)
        self._space = ""

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        self._end_event()
        events, self._events = self._events, []
        return events

    # What was found.

    def content(self, text: str) -> None:
        """Take text that is for the reader."""
        if not self._trims:
            self._add(Content, text)
            return
        body = text.rstrip()
        if not body:
            self._space += text
            return
        begins = self.called and not self._said
        self._add(Content, body.lstrip() if begins else self._space + body)
        self._said = True
        self._space = text[len(body) :]

    def reasoning(self, text: str) -> None:
        """Take text of the model's thinking, from this place of the whole text.

        Line breaks around it are markup.
        """
        begin = self._dropped + self._at
        if self.thoughts and self.thoughts[-1][1] == begin:
            begin = self.thoughts.pop()[0]
        self.thoughts.append((begin, self._dropped + self._at + len(text)))
        body = text.rstrip("\n")
        if not body:
            self._thought += text
            return
        self._add(Reasoning, self._thought + body if self._thinks else body.lstrip("\n"))
        self._thinks = True
        self._thought = text[len(body) :]

    def call(self, name: str) -> None:
        """Begin a tool call; what was read of it is final."""
        self._mark = None
        self.called = True
        self._end_event()
        self._events.append(Call(name))

    def arguments(self, text: str) -> None:
        """Take a piece of the call's arguments."""
        self._add(Arguments, text)

    def _add(self, kind: type[Content | Reasoning | Arguments], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._end_event()
            self._kind = kind
        self._pieces.append(text)

    def _end_event(self) -> None:
        if text := "".join(self._pieces):
            self._events.append(self._kind(text))
        self._pieces.clear()

    # Reading.

    def mark(self) -> None:
        """Keep this place to go back to."""
        self._mark = self._at

    def rewind(self) -> None:
        """Go back to the mark, and forget it."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def release(self) -> None:
        """Forget the mark."""
        self._mark = None

    def get(self) -> Parse[str]:
        """Return the next character, or `END`."""
        while self._at == len(self._text):
            if self._ended:
                return END
            yield
        self._at += 1
        return self._text[self._at - 1]

    def peek(self) -> Parse[str]:
        """Return the next character, or `END`, without reading it."""
        while self._at == len(self._text):
            if self._ended:
                return END
            yield
        return self._text[self._at]

    def skip(self, chars: str) -> Parse[str]:
        """Read over any of `chars`; return the next character without reading it."""
        while (char := (yield from self.peek())) != END and char in chars:
            self._at += 1
        return char

    def literal(self, expected: str) -> Parse[bool]:
        """Read `expected`, or stop within it and return False."""
        for char in expected:
            if (yield from self.peek()) != char:
                return False
            self._at += 1
        return True

    def over(self, space: str, expected: str) -> Parse[bool]:
        """Read over any of `space` and over `expected`; if that is not there, over nothing."""
        self.mark()
        yield from self.skip(space)
        if (yield from self.literal(expected)):
            self.release()
            return True
        self.rewind()
        return False

    def until(self, markers: Sequence[str], sink: Sink) -> Parse[str]:
        """Read up to and over the first marker and return it, or `END`; `sink` takes the text.

        No marker may be part of another.
        """
        find = _any_of(tuple(markers)) if markers else None
        while True:
            found = find.search(self._text, self._at) if find else None
            if found:
                sink(self._text[self._at : found.start()])
                self._at = found.end()
                return found.group()
            certain = len(self._text)
            if not self._ended:
                certain -= begun(markers, self._text, self._at)
            sink(self._text[self._at : certain])
            self._at = certain
            if self._ended:
                return END
            yield

    def name(self, ends: str) -> Parse[str | None]:
        """Read a name up to one of the characters `ends`; None if there is no name."""
        name = ""
        while (char := (yield from self.peek())) != END and char not in ends:
            if len(name) == MAX_NAME_CHARS or char in _NOT_IN_NAMES:
                return None
            name += char
            self._at += 1
        return name.strip() or None if char != END else None


def is_name(text: str) -> bool:
    """Tell whether `Reader.name` reads such a text as a whole."""
    whole = 0 < len(text) <= MAX_NAME_CHARS and text == text.strip()
    return whole and _NOT_IN_NAMES.isdisjoint(text)


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
