"""Calls that are JSON: `{"name": ..., "arguments": {...}}`, or the arguments alone."""

from __future__ import annotations

import enum
import json
import re
from typing import Final

from gateway.answers.json_text import SCALAR, SCALAR_CHARS, JsonContainer, Place
from gateway.answers.reader import END, MAX_NAME_CHARS, SPACE, Parse, Reader, Sink

_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_MAX_HELD_CHARS: Final = 2**16
"""Characters of a call that are read before its name and the begin of its arguments are known."""
_HALF_OF_A_PAIR: Final = re.compile("[\ud800-\udfff]")
"""What JSON may escape, but no answer can tell."""


class Outcome(enum.Enum):
    """How reading a call ended."""

    NONE = enum.auto()  # it is none: no event tells of it
    CALL = enum.auto()
    BROKEN = enum.auto()  # within its arguments: the text has ended, or is no JSON


def read_arguments(reader: Reader) -> Parse[Outcome]:
    """Read an object as the arguments of a call that has begun."""
    if (yield from reader.skip(SPACE)) != "{":
        return Outcome.BROKEN
    whole = yield from _container(reader, reader.arguments)
    return Outcome.CALL if whole else Outcome.BROKEN


def read_call(reader: Reader, *, needs_arguments: bool = False) -> Parse[Outcome]:
    """Read an object that names a function and its arguments.

    The caller has marked the place, and rewinds if it is no call. What is wrong behind the
    arguments of a call is left unread.
    """
    if (yield from reader.skip(SPACE)) != "{":
        return Outcome.NONE
    yield from reader.get()
    name = held = ""
    begun = False
    while (char := (yield from reader.skip(SPACE))) != "}":
        key = (yield from _string(reader)) if char == '"' else None
        if key is None or (yield from reader.skip(SPACE)) != ":":
            return _cut(reader, begun=begun)
        yield from reader.get()
        char = yield from reader.skip(SPACE)
        if key in _ARGUMENTS and name and char == "{" and not begun:
            reader.call(name)
            if (yield from read_arguments(reader)) is Outcome.BROKEN:
                return Outcome.BROKEN
            begun = True
            reader.mark()
        else:
            value = yield from _value(reader)
            if value is None:
                return _cut(reader, begun=begun)
            if key == "name" and not name:
                name = _text(value) or ""
                if not 0 < len(name) <= MAX_NAME_CHARS or _HALF_OF_A_PAIR.search(name):
                    return Outcome.NONE
            elif key in _ARGUMENTS and not begun and not held:
                held = "{}" if value == "null" else value
                if held[0] != "{":
                    return Outcome.NONE
            if name and held and not begun:
                reader.call(name)
                reader.arguments(held)
                begun = True
                reader.mark()
        if (char := (yield from reader.skip(SPACE))) == ",":
            yield from reader.get()
        elif char != "}":
            return _cut(reader, begun=begun)
    yield from reader.get()
    if not begun:
        if not name or needs_arguments:
            return Outcome.NONE
        reader.call(name)
        reader.arguments("{}")
    reader.release()
    return Outcome.CALL


def _cut(reader: Reader, *, begun: bool) -> Outcome:
    """Return what an object is that goes on as no object does."""
    if not begun:
        return Outcome.NONE
    reader.rewind()
    return Outcome.CALL


def _value(reader: Reader) -> Parse[str | None]:
    """Read a value and return it as written; None if it is no JSON, or very long."""
    char = yield from reader.peek()
    if char == '"':
        text = yield from _string(reader)
        return None if text is None else json.dumps(text)
    parts: list[str] = []
    if char != END and char in "{[":
        whole = yield from _container(reader, parts.append, _MAX_HELD_CHARS)
        return "".join(parts) if whole else None
    while (char := (yield from reader.peek())) != END and char in SCALAR_CHARS:
        parts.append((yield from reader.get()))
        if len(parts) > _MAX_HELD_CHARS:
            return None
    value = "".join(parts)
    return value if SCALAR.fullmatch(value) else None


def _string(reader: Reader) -> Parse[str | None]:
    """Read a string and return its text; None if it is no JSON, or very long."""
    parts = [(yield from reader.get())]
    escaped = False
    while (char := (yield from reader.get())) != END and len(parts) < _MAX_HELD_CHARS:
        parts.append(char)
        if char == '"' and not escaped:
            return _text("".join(parts))
        escaped = char == "\\" and not escaped
    return None


def _container(reader: Reader, sink: Sink, most: float = float("inf")) -> Parse[bool]:
    """Read an object or array, character by character into `sink`; False where it is none.

    The character at fault goes into the sink as well.
    """
    scan = JsonContainer()
    read = 0
    while scan.place is not Place.DONE:
        in_string = scan.in_string
        if (char := (yield from reader.get())) == END or (read := read + 1) > most:
            return False
        fits = scan.step(char)
        # Models write line breaks into strings; JSON has them escaped.
        sink(json.dumps(char)[1:-1] if in_string and char < " " else char)
        if not fits:
            return False
    return True


def _text(value: str) -> str | None:
    """Return what a JSON string says; None for anything else."""
    try:
        text = json.loads(value, strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
