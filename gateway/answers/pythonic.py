"""Calls in Python, of Llama 3.2 and 4: the answer is `[f(a=1, b="x"), g()]`.

Arguments are Python's literals, or JSON's. They become JSON as they grow.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.answers.json_calls import Outcome
from gateway.answers.python_text import read_literal
from gateway.answers.reader import END, SPACE, Parse, Reader
from gateway.answers.tools import Tools

PYTHON_START: Final = "<|python_start|>"
PYTHON_END: Final = "<|python_end|>"
NAME: Final = re.compile(r"[^\W\d]\w*")
_FUNCTION: Final = re.compile(r"[^\W\d][\w.-]*")


def pythonic(reader: Reader, _tools: Tools) -> Parse[None]:
    """Read text with calls: at its begin, or behind the mark. Code behind the mark is text."""
    yield from _calls(reader, "")
    while (yield from reader.until([PYTHON_START], reader.content)) != END:
        yield from _calls(reader, PYTHON_START)


def _calls(reader: Reader, shown: str) -> Parse[None]:
    """Read a list of calls; `shown` is text, too, if there is none."""
    begin = "["
    while True:
        reader.mark()
        yield from reader.skip(SPACE)
        found = yield from reader.literal(begin)
        outcome = (yield from _call(reader)) if found else Outcome.NONE
        if outcome is Outcome.NONE:
            reader.rewind()
            reader.content(shown)
            return
        if outcome is Outcome.BROKEN:
            yield from reader.until([PYTHON_END], reader.arguments)
            return
        if (yield from reader.over(SPACE, "]")):
            yield from reader.over(SPACE, PYTHON_END)
            return
        begin, shown = ",", ""


def _call(reader: Reader) -> Parse[Outcome]:
    """Read a call. The caller has marked the place, and rewinds if it is none."""
    name = yield from reader.name("(")
    if name is None or not _FUNCTION.fullmatch(name):
        return Outcome.NONE
    yield from reader.get()
    if (yield from reader.skip(SPACE)) == ")":
        yield from reader.get()
        reader.call(name)
        reader.arguments("{}")
        return Outcome.CALL
    key = yield from reader.name("=")
    if key is None or not NAME.fullmatch(key):
        return Outcome.NONE
    reader.call(name)
    written = "{"
    while True:
        yield from reader.get()
        reader.arguments(f'{written}"{key}": ')
        if not (yield from read_literal(reader)):
            return Outcome.BROKEN
        if (yield from reader.skip(SPACE)) == ",":
            yield from reader.get()
            following = yield from reader.skip(SPACE)
        elif (following := (yield from reader.peek())) != ")":
            return Outcome.BROKEN
        if following == ")":
            yield from reader.get()
            reader.arguments("}")
            return Outcome.CALL
        reader.mark()
        key = yield from reader.name("=")
        if key is None or not NAME.fullmatch(key):
            reader.rewind()
            return Outcome.BROKEN
        reader.release()
        written = ", "
