"""One HTTP/1.1 connection that reads streams of server-sent events with little work an event.

An HTTP library makes some ten objects of every chunk, which would measure the generator. This reads
what the servers of OpenAI's API send (RFC 9112 chunks or an answer up to its end; the event stream
of HTML's living standard) and no more.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Final, cast

from benchmarks.lib.load.tally import Gaps, Stream, now

_TEXT: Final = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":\s?"(?!")')
_TOKENS: Final = re.compile(rb'"completion_tokens":\s?(\d+)')
_MOST_BYTES: Final = 4 * 2**20  # of a head, a chunk or an event


class Connection(asyncio.BufferedProtocol):
    """Carries one request at a time; `on_end(self, failure)` is called at the end of each.

    `failure` is None for a whole answer. `buffer` is shared by all connections of a loop, since
    what is read into it is parsed before another one reads.
    """

    def __init__(
        self, buffer: bytearray, gaps: Gaps, on_end: Callable[[Connection, str | None], None]
    ) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._gaps = gaps
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.stream: Stream | None = None
        self._begin()

    @property
    def usable(self) -> bool:
        """Another request may be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._keeps

    def send(self, request: bytes, stream: Stream, timeout_s: float) -> None:
        """Send a whole request, whose answer fills `stream`."""
        assert self._transport is not None
        assert self.stream is None
        self._begin()
        self.stream = stream
        self._timer = self._loop.call_later(timeout_s, self._end, "timeout")
        self._transport.write(request)

    def close(self) -> None:
        """End the connection; a request under way fails as unfinished."""
        self._end("unfinished")

    def _begin(self) -> None:
        self._head: bytes | None = b""  # None: it was read
        self._rest = b""  # of a chunk that is not complete
        self._event = b""  # likewise of an event
        self._status = 0
        self._left: int | None = None  # bytes of the body; None: up to the end
        self._chunked = False
        self._keeps = True
        self._done = False  # the stream has said so
        self._failure: str | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base

    def get_buffer(self, _sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.stream is None:  # nothing was asked for
            self._end("unasked bytes")
            return
        data = bytes(self._view[:nbytes])
        try:
            if self._head is not None:
                data = self._read_head(self._head + data)
            if self._head is None:
                self._read_body(data)
        except ValueError:
            self._end("not HTTP")

    def eof_received(self) -> bool:
        if self.stream is not None and self._head is None and not self._chunked:
            self._keeps = False
            if self._left is None:  # the end of the connection is the end of the answer
                self._answered()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("reset" if exc is not None else "closed early")

    # Reading.

    def _read_head(self, data: bytes) -> bytes:
        """Return what is behind the head. Raises `ValueError`."""
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            self._head = _bounded(data)
            return b""
        status, *lines = head.split(b"\r\n")
        version, code, *_ = status.split(b" ")
        self._status = int(code)
        fields = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip().lower()
        self._keeps = version == b"HTTP/1.1" and fields.get(b"connection") != b"close"
        self._chunked = fields.get(b"transfer-encoding", b"").endswith(b"chunked")
        if b"content-length" in fields:
            self._left = int(fields[b"content-length"])
        self._head = None
        return rest

    def _read_body(self, data: bytes) -> None:
        """Raise `ValueError`."""
        if self._chunked:
            self._read_chunks(self._rest + data)
            return
        if data:
            self._take(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._answered()

    def _read_chunks(self, data: bytes) -> None:
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:end].partition(b";")[0], 16)
            body = end + 2
            if len(data) < body + size + 2:
                break
            at = body + size + 2
            if not size:
                self._rest = b""
                self._answered()
                return
            self._take(data[body : body + size])
        self._rest = _bounded(data[at:])

    def _take(self, piece: bytes) -> None:
        """Take in a piece of the body. Raises `ValueError`."""
        if self._status != 200:
            self._event = _bounded(self._event + piece)
            return
        if b"\r" in piece:  # it may end lines, and JSON has none
            piece = piece.replace(b"\r", b"")
        *events, self._event = (self._event + piece).split(b"\n\n")
        _bounded(self._event)
        if events:
            at = now()
            for event in events:
                self._take_event(event, at)

    def _take_event(self, event: bytes, at: float) -> None:
        assert self.stream is not None
        if _TEXT.search(event):
            self.stream.seen(at, self._gaps)
        elif event.startswith(b"data: [DONE]") or event.startswith(b"data:[DONE]"):
            self._done = True
        elif b'"error"' in event:
            self._failure = f"error event: {_error_of(event.partition(b'data:')[2])}"
        if (tokens := _TOKENS.search(event)) is not None:
            self.stream.tokens = int(tokens[1])

    def _answered(self) -> None:
        failure = self._failure
        if self._status != 200:
            failure = f"status {self._status} {_error_of(self._event)}".rstrip()
        elif failure is None and not self._done:
            failure = "ended early"
        self._end(failure, keep=True)

    def _end(self, failure: str | None, *, keep: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not (keep and self._keeps) and self._transport is not None:
            self._transport.abort()
        if self.stream is not None:
            self._on_end(self, failure)


def _bounded(data: bytes) -> bytes:
    """Raise `ValueError` for more than any server of this kind sends."""
    if len(data) > _MOST_BYTES:
        raise ValueError("too large")
    return data


def _error_of(body: bytes) -> str:
    """Return what OpenAI's error body calls the error."""
    try:
        error: Any = json.loads(body)["error"]
        return str(error["code"] or error["type"])
    except (ValueError, KeyError, TypeError):
        return ""
