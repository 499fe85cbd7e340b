"""gpt-oss' answers: messages in channels, each with a header.

`<|channel|>analysis<|message|>` begins reasoning, a header with `to=functions.f` a call, any other
one text. `<|end|>` ends a message; `<|start|>assistant` begins the next header.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.answers.json_calls import Outcome, read_arguments
from gateway.answers.reader import END, Parse, Reader, Sink
from gateway.answers.tools import Tools

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
MESSAGE_END: Final = "<|end|>"
CALL_END: Final = "<|call|>"
RETURN: Final = "<|return|>"
_ENDS: Final = (MESSAGE_END, CALL_END, RETURN, START, CHANNEL)
_RECIPIENT: Final = re.compile(r"to=functions\.([^\s<]{1,256})")
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_MAX_HEADER_CHARS: Final = 1024
_NOT_IN_HEADERS: Final = (MESSAGE_END, CALL_END, RETURN, START)


def harmony(reader: Reader, tools: Tools) -> Parse[None]:
    """Read an answer that begins within a header, behind `<|start|>assistant`."""
    marker = ""  # the one before the header
    while True:
        reader.mark()
        header = yield from _header(reader, marker)
        sink: Sink = reader.content
        if header is None:
            reader.rewind()
            reader.content(marker)
        else:
            reader.release()
            recipient = _RECIPIENT.search(header) if tools else None
            channel = _CHANNEL.search(header)
            if recipient:
                reader.call(recipient[1])
                if (yield from read_arguments(reader)) is Outcome.BROKEN:
                    sink = reader.arguments
            elif channel and channel[1] == "analysis":
                sink = reader.reasoning
        marker = yield from reader.until(_ENDS, sink)
        if marker in (MESSAGE_END, CALL_END, RETURN):
            marker = yield from reader.until([START, CHANNEL], reader.content)
        if marker == END:
            return


def _header(reader: Reader, marker: str) -> Parse[str | None]:
    """Return a header with its marks, up to its message; None if there is none."""
    header = marker
    if marker == START:
        while (char := (yield from reader.peek())) != END and char.islower():
            header += yield from reader.get()
    if marker != CHANNEL:
        following = yield from reader.skip(" ")
        first = CHANNEL if following == "<" else "to="
        if not (yield from reader.literal(first)):
            return None
        header += first
    while not header.endswith(MESSAGE):
        char = yield from reader.get()
        if char in (END, "\n") or len(header) > _MAX_HEADER_CHARS:
            return None
        header += char
        if header.endswith(_NOT_IN_HEADERS) or header.count(CHANNEL) > 1:
            return None
    return header
