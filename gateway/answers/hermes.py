"""Hermes' and Qwen's calls: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from typing import Final

from gateway.answers.json_calls import Outcome, read_call
from gateway.answers.reader import END, SPACE, Parse, Reader
from gateway.answers.tools import Tools

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


def hermes(reader: Reader, _tools: Tools) -> Parse[None]:
    """Read text with calls."""
    while (marker := (yield from reader.until([OPEN], reader.content))) != END:
        reader.mark()
        outcome = yield from read_call(reader)
        if outcome is Outcome.NONE:
            reader.rewind()
            reader.content(marker)
        elif outcome is Outcome.BROKEN:
            yield from reader.until([CLOSE], reader.arguments)
        else:
            yield from close(reader, CLOSE)


def close(reader: Reader, end: str) -> Parse[bool]:
    """Read over the end of a call, and a brace too many or one that is missing before it."""
    return (yield from reader.over(SPACE + "}", end))
