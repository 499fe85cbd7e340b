"""Rewrite Python's literals as JSON, character by character."""

from __future__ import annotations

import json
import math
import re
from typing import Final

from gateway.answers.json_text import MAX_DEPTH, SCALAR
from gateway.answers.reader import END, SPACE, Parse, Reader

_WORDS: Final = {
    **{"True": "true", "False": "false", "None": "null"},
    **{"true": "true", "false": "false", "null": "null"},
}
_SCALAR: Final = re.compile(r"[\w.+-]")
_MAX_SCALAR_CHARS: Final = 1024
_CLOSERS: Final = {"[": "]", "{": "}"}
_ESCAPES: Final = {
    **{"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f"},
    **{"\\": "\\\\", '"': '\\"', "'": "'", "/": "/", "\n": ""},
    **{"a": "\\u0007", "v": "\\u000b"},
}
"""Behind a backslash -> as JSON."""
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


def read_literal(reader: Reader) -> Parse[bool]:
    """Read a number, a string, a word, a list or a dict as arguments; False where it is none.

    The part before a mistake is written. The rest is left unread.
    """
    closers: list[str] = []
    between = ""  # what comes before the next element
    may_close = False
    while True:
        char = yield from reader.skip(SPACE)
        if may_close and closers and char == closers[-1]:
            reader.arguments(closers.pop())
            yield from reader.get()
        else:
            reader.arguments(between)
            between = ""
            in_dict = bool(closers) and closers[-1] == "}"
            if in_dict and not (yield from _key(reader)):
                return False
            char = yield from reader.skip(SPACE)
            if char != END and char in "[{" and len(closers) < MAX_DEPTH:
                closers.append(_CLOSERS[char])
                reader.arguments(char)
                yield from reader.get()
                may_close = True
                continue
            if not (yield from _atom(reader)):
                return False
        while closers and (yield from reader.skip(SPACE)) == closers[-1]:
            reader.arguments(closers.pop())
            yield from reader.get()
        if not closers:
            return True
        if (yield from reader.peek()) != ",":
            return False
        yield from reader.get()
        between, may_close = ", ", True


def _key(reader: Reader) -> Parse[bool]:
    """Read a dict's key and its colon. JSON's keys are strings."""
    char = yield from reader.peek()
    if char != END and char in "\"'":
        if not (yield from _string(reader)):
            return False
    else:
        scalar = yield from _scalar(reader)
        if scalar is None:
            return False
        reader.arguments(json.dumps(scalar))
    if (yield from reader.skip(SPACE)) != ":":
        return False
    yield from reader.get()
    reader.arguments(": ")
    return True


def _atom(reader: Reader) -> Parse[bool]:
    char = yield from reader.peek()
    if char != END and char in "\"'":
        return (yield from _string(reader))
    scalar = yield from _scalar(reader)
    reader.arguments(scalar or "")
    return scalar is not None


def _string(reader: Reader) -> Parse[bool]:
    """Read a string; False where the text ends within it."""
    quote = yield from reader.get()
    reader.arguments('"')
    while (char := (yield from reader.get())) != quote:
        if char == END:
            return False
        if char == "\\":
            yield from _escape(reader)
        elif char < " " or char in '"\\':
            reader.arguments(json.dumps(char)[1:-1])
        else:
            reader.arguments(char)
    reader.arguments('"')
    return True


def _escape(reader: Reader) -> Parse[None]:
    """Read what is behind a backslash; what has no meaning there is as written."""
    kind = yield from reader.peek()
    if kind == END:
        return
    yield from reader.get()
    if kind in _ESCAPES:
        reader.arguments(_ESCAPES[kind])
        return
    size = _HEX_DIGITS.get(kind, 0)
    digits = ""
    while len(digits) < size:
        char = yield from reader.peek()
        if char == END or char not in "0123456789abcdefABCDEF":
            break
        digits += yield from reader.get()
    if size and len(digits) == size and (code := int(digits, 16)) <= 0x10FFFF:
        reader.arguments(json.dumps(chr(code))[1:-1])
    else:
        reader.arguments("\\\\" + json.dumps(kind)[1:-1] + digits)


def _scalar(reader: Reader) -> Parse[str | None]:
    """Read a number or a word as JSON; None, and nothing is read, where it is none."""
    reader.mark()
    text = ""
    while (char := (yield from reader.peek())) != END and _SCALAR.match(char):
        if len(text) == _MAX_SCALAR_CHARS:
            break
        text += yield from reader.get()
    known = _as_json(text)
    if known is None:
        reader.rewind()
    else:
        reader.release()
    return known


def _as_json(text: str) -> str | None:
    if text in _WORDS or SCALAR.fullmatch(text):
        return _WORDS.get(text, text)
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None
