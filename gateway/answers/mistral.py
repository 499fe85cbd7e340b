"""Mistral's calls, of both generations.

`[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, and since its tokenizer 11 `[TOOL_CALLS]f{...}`,
with `[CALL_ID]` and `[ARGS]` before the arguments in some models.
"""

from __future__ import annotations

from typing import Final

from gateway.answers.hermes import close
from gateway.answers.json_calls import Outcome, read_arguments, read_call
from gateway.answers.reader import END, SPACE, Parse, Reader
from gateway.answers.tools import Tools

OPEN: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"


def mistral(reader: Reader, _tools: Tools) -> Parse[None]:
    """Read text with calls."""
    while (marker := (yield from reader.until([OPEN], reader.content))) != END:
        while marker == OPEN:
            reader.mark()
            is_list = (yield from reader.skip(SPACE)) == "["
            found = yield from (_list(reader) if is_list else _named(reader))
            if found is Outcome.NONE:
                reader.rewind()
                reader.content(marker)
            broken = found is Outcome.BROKEN
            marker = (yield from reader.until([OPEN], reader.arguments)) if broken else END


def _list(reader: Reader) -> Parse[Outcome]:
    yield from reader.get()
    outcome = yield from read_call(reader)
    while outcome is Outcome.CALL:
        if (yield from close(reader, "]")) or not (yield from close(reader, ",")):
            return Outcome.CALL
        reader.mark()
        if (outcome := (yield from read_call(reader))) is Outcome.NONE:
            reader.rewind()
            reader.content(",")
            return Outcome.CALL
    return outcome


def _named(reader: Reader) -> Parse[Outcome]:
    name = yield from reader.name("[{ \n")
    if name is None:
        return Outcome.NONE
    if (yield from reader.skip(SPACE)) == "[" and not (yield from _between(reader)):
        return Outcome.NONE
    if (yield from reader.skip(SPACE)) != "{":
        return Outcome.NONE
    reader.call(name)
    return (yield from read_arguments(reader))


def _between(reader: Reader) -> Parse[bool]:
    """Read an id, which is replaced by one of our own, and the marker of arguments."""
    yield from reader.get()
    if (yield from reader.peek()) == CALL_ID[1]:
        if not (yield from reader.literal(CALL_ID[1:])):
            return False
        if (yield from reader.name("[{")) is None:
            return False
        if (yield from reader.peek()) == "{":
            return True
        yield from reader.get()
    return (yield from reader.literal(ARGS[1:]))
