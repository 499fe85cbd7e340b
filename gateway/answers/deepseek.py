"""DeepSeek's calls, of V3 and R1 and of V3.1.

A call is `function<sep>f`, then a fenced block of JSON; since V3.1 `f<sep>{...}`.
"""

from __future__ import annotations

from typing import Final

from gateway.answers.json_calls import Outcome, read_arguments
from gateway.answers.reader import END, SPACE, Parse, Reader
from gateway.answers.tools import Tools

CALLS: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
CALL: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
FENCE: Final = "```json"


def deepseek(reader: Reader, _tools: Tools) -> Parse[None]:
    """Read text with calls; the marks around all calls may be missing."""
    while (marker := (yield from reader.until([CALLS, CALLS_END, CALL], reader.content))) != END:
        if marker == CALLS_END and reader.called:
            continue
        reader.mark()
        name, fenced = yield from _header(reader, marker)
        if name is None:
            reader.rewind()
            reader.content(marker)
            continue
        reader.call(name)
        if (yield from read_arguments(reader)) is Outcome.BROKEN:
            yield from reader.until([CALL_END], reader.arguments)
            continue
        if fenced:
            yield from reader.over(SPACE, "```")
        yield from reader.over(SPACE, CALL_END)


def _header(reader: Reader, marker: str) -> Parse[tuple[str | None, bool]]:
    """Return a call's name, None if there is none, and whether its arguments are fenced."""
    if marker == CALLS:
        yield from reader.skip(SPACE)
    if marker != CALL and not (yield from reader.literal(CALL)):
        return None, False
    name = yield from reader.name("<")
    if name is None or not (yield from reader.literal(SEPARATOR)):
        return None, False
    if (yield from reader.skip(SPACE)) == "{":
        return name, False
    name = yield from reader.name("\n")
    yield from reader.skip(SPACE)
    if name is None or not (yield from reader.literal(FENCE)):
        return None, False
    return (name if (yield from reader.skip(SPACE)) == "{" else None), True
