"""Llama 3's calls: the answer is `{"name": "f", "parameters": {...}}`, several joined by `;`."""

from __future__ import annotations

from typing import Final

from gateway.answers.json_calls import Outcome, read_call
from gateway.answers.reader import END, SPACE, Parse, Reader
from gateway.answers.tools import Tools

PYTHON_TAG: Final = "<|python_tag|>"


def llama(reader: Reader, _tools: Tools) -> Parse[None]:
    """Read text with calls: at its begin, or behind the tag. Code behind the tag is text."""
    yield from _calls(reader, "")
    while (yield from reader.until([PYTHON_TAG], reader.content)) != END:
        yield from _calls(reader, PYTHON_TAG)


def _calls(reader: Reader, shown: str) -> Parse[None]:
    """Read calls; `shown` is text, too, if there are none."""
    while True:
        reader.mark()
        outcome = yield from read_call(reader, needs_arguments=True)
        if outcome is Outcome.NONE:
            reader.rewind()
            reader.content(shown)
            return
        if outcome is Outcome.BROKEN:
            yield from reader.until([], reader.arguments)
            return
        reader.mark()
        if (yield from reader.skip(SPACE)) != ";":
            reader.rewind()
            return
        yield from reader.get()
        reader.release()
        shown = ";"
