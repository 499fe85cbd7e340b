"""JSON objects and arrays character by character."""

from __future__ import annotations

import enum
import re
from typing import Final

_SPACE: Final = " \t\r\n"
SCALAR: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
SCALAR_CHARS: Final = frozenset("+-.0123456789aeflnrstuE")
MAX_DEPTH: Final = 256


class Place(enum.Enum):
    """Where in a JSON text the next character is."""

    START = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    SCALAR = enum.auto()
    AFTER = enum.auto()
    DONE = enum.auto()


class JsonContainer:
    """Accepts one JSON object or array. Control characters in strings are let by."""

    def __init__(self) -> None:
        self.place = Place.START
        self._closers: list[str] = []
        self._is_key = False
        self._token = ""

    @property
    def in_string(self) -> bool:
        """Tell whether the next character belongs to a string."""
        return self.place in (Place.STRING, Place.ESCAPE, Place.HEX)

    def step(self, char: str) -> bool:
        """Take a character; False if no JSON goes on so."""
        if self.place is Place.STRING:
            if char == '"':
                self.place = Place.COLON if self._is_key else Place.AFTER
            elif char == "\\":
                self.place = Place.ESCAPE
            return True
        if self.place is Place.ESCAPE:
            self.place, self._token = (Place.HEX, "") if char == "u" else (Place.STRING, "")
            return char in '"\\/bfnrtu'
        if self.place is Place.HEX:
            self._token += char
            if len(self._token) == 4:
                self.place = Place.STRING
            return char in "0123456789abcdefABCDEF"
        if self.place is Place.SCALAR:
            if char in SCALAR_CHARS:
                self._token += char
                return len(self._token) <= 1024
            if not SCALAR.fullmatch(self._token):
                return False
            self.place = Place.AFTER
        return char in _SPACE or self._between(char)

    def _between(self, char: str) -> bool:
        """Take a character outside strings, numbers and words."""
        place = self.place
        if place is Place.START:
            return char in "{[" and self._open(char)
        if place is Place.COLON:
            self.place = Place.VALUE
            return char == ":"
        if place is Place.AFTER and char == ",":
            self.place = Place.KEY if self._closers[-1] == "}" else Place.VALUE
            return True
        if place in (Place.AFTER, Place.KEY_OR_END, Place.VALUE_OR_END) and char in "}]":
            expected = self._closers.pop()
            self.place = Place.AFTER if self._closers else Place.DONE
            return char == expected
        if place in (Place.KEY, Place.KEY_OR_END):
            self.place, self._is_key = Place.STRING, True
            return char == '"'
        return place in (Place.VALUE, Place.VALUE_OR_END) and self._value(char)

    def _value(self, char: str) -> bool:
        if char in "{[":
            return self._open(char)
        if char == '"':
            self.place, self._is_key = Place.STRING, False
            return True
        self.place, self._token = Place.SCALAR, char
        return char in SCALAR_CHARS

    def _open(self, char: str) -> bool:
        self._closers.append("}" if char == "{" else "]")
        self.place = Place.KEY_OR_END if char == "{" else Place.VALUE_OR_END
        return len(self._closers) <= MAX_DEPTH
