"""Calls whose arguments are tagged texts, of Qwen3-Coder and of GLM-4.5.

`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, and
`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`. They become JSON: a text
by the type that the tool's schema names.
"""

from __future__ import annotations

import json
from typing import Final

from gateway.answers.hermes import CLOSE, OPEN, close
from gateway.answers.reader import END, SPACE, Parse, Reader
from gateway.answers.tools import Tools, as_json, parameter_types

FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
KEY: Final = "<arg_key>"
KEY_END: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
VALUE_END: Final = "</arg_value>"


def qwen3_coder(reader: Reader, tools: Tools) -> Parse[None]:
    """Read text with calls; `<tool_call>` may be missing."""
    while (marker := (yield from reader.until([OPEN, FUNCTION], reader.content))) != END:
        reader.mark()
        if marker == OPEN:
            yield from reader.skip(SPACE)
        begun = marker == FUNCTION or (yield from reader.literal(FUNCTION))
        name = (yield from reader.name(">")) if begun else None
        if name is None:
            reader.rewind()
            reader.content(marker)
            continue
        yield from reader.get()
        arguments = _Arguments(reader, tools, name)
        ends = [PARAMETER, FUNCTION_END, CLOSE]
        while (marker := (yield from reader.until(ends, arguments.beside))) == PARAMETER:
            reader.mark()
            if (key := (yield from reader.name(">"))) is None:
                reader.rewind()
                arguments.beside(PARAMETER)
                continue
            reader.release()
            yield from reader.get()
            yield from arguments.read(key, PARAMETER_END, trims=True)
        arguments.end(whole=marker != END)
        if marker == FUNCTION_END:
            yield from close(reader, CLOSE)


def glm45(reader: Reader, tools: Tools) -> Parse[None]:
    """Read text with calls."""
    while (marker := (yield from reader.until([OPEN], reader.content))) != END:
        reader.mark()
        yield from reader.skip(SPACE)
        name = yield from reader.name("\n<")
        following = yield from reader.skip(SPACE)
        if name is None or following != "<":
            reader.rewind()
            reader.content(marker)
            continue
        arguments = _Arguments(reader, tools, name)
        while (marker := (yield from reader.until([KEY, CLOSE], arguments.beside))) == KEY:
            reader.mark()
            key = yield from reader.name("<")
            known = key is not None and (yield from reader.literal(KEY_END))
            yield from reader.skip(SPACE)
            if key is None or not known or not (yield from reader.literal(VALUE)):
                reader.rewind()
                arguments.beside(KEY)
                continue
            reader.release()
            yield from arguments.read(key, VALUE_END, trims=False)
        arguments.end(whole=marker != END)


class _Arguments:
    """A call's arguments as JSON that grows."""

    def __init__(self, reader: Reader, tools: Tools, name: str) -> None:
        """Begin the call."""
        self._reader = reader
        self._tools = tools
        self._name = name
        self._written = False
        self._beside: list[str] = []
        reader.call(name)
        reader.arguments("{")

    def read(self, key: str, end: str, *, trims: bool) -> Parse[None]:
        """Read the text of an argument; with `trims`, one line break around it is markup."""
        reader = self._reader
        types = parameter_types(self._tools, self._name, key)
        separator = ", " if self._written else ""
        reader.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._written = True
        if types == {"string"}:
            reader.arguments('"')
            if (yield from reader.until([end], _Escaped(reader, trims=trims))) != END:
                reader.arguments('"')
            return
        parts: list[str] = []
        marker = yield from reader.until([end], parts.append)
        text = "".join(parts)
        if trims:
            text = text.removeprefix("\n").removesuffix("\n")
        reader.arguments(text if marker == END else as_json(text, types))

    def beside(self, text: str) -> None:
        """Keep text between arguments until they have ended, so that nothing parts them."""
        self._beside.append(text)

    def end(self, *, whole: bool) -> None:
        """End the call; one that the text's end cut off stays open."""
        if whole:
            self._reader.arguments("}")
        self._reader.content("".join(self._beside))


class _Escaped:
    """Takes the text of a string, and gives it on as JSON without its quotes."""

    def __init__(self, reader: Reader, *, trims: bool) -> None:
        self._reader = reader
        self._trims = trims
        self._first = trims
        self._held = ""

    def __call__(self, text: str) -> None:
        if not text:
            return
        if self._first and text[0] == "\n":
            text = text[1:]
        self._first = False
        text = self._held + text
        self._held = "\n" if self._trims and text.endswith("\n") else ""
        text = text[: len(text) - len(self._held)]
        self._reader.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
