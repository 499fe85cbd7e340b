"""HTTP connections that wait for no client for ever; uvicorn's own do."""

from __future__ import annotations

import asyncio
import contextlib
import re
import weakref
from typing import Any, ClassVar, Final, cast

import h11
from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_BODY: Final = "outrider.http.response.piece"  # among the scope's extensions
_STREAMED: Final = "outrider.http.response.streamed"  # among them once a piece was written
_LINE_BEGUN: Final = re.compile(  # RFC 9112, section 3; no registered method has more letters
    rb"[-!#$%&'*+.^_`|~0-9A-Za-z]{0,32}(?: [\x21-\x7e]*(?: [HTP/0-9.]{0,8}\r?)?)?"
)
_MAX_LOOKS: Final = 64
"""Each look at a head copies it, and a client may send it byte by byte."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_FRAME_BYTES: Final = 16  # counted for a chunk's frame
_MAX_EXCESS_BYTES: Final = 2**14
_COMMENT: Final = b"3\r\n:\n\n\r\n"  # a chunk between two events, which clients pass over
_PROBES_S: Final = 0.05, 1.0  # the first pause between two probes doubles to the second


class _Connection(h11.Connection):
    """Refuses a body in many tiny chunks, with which one client would keep all others waiting.

    h11 takes as long for a chunk of one byte as for one of kilobytes.
    """

    _excess = 0  # bytes of chunks' frames, less what the body's own bytes make up for

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            frame_bytes = _FRAME_BYTES if event.chunk_start else 0
            self._excess = max(0, self._excess + frame_bytes - 2 * len(event.data))
            if self._excess > _MAX_EXCESS_BYTES:
                raise h11.RemoteProtocolError("the body's chunks are too small")
        return event

    def start_next_cycle(self) -> None:
        super().start_next_cycle()
        self._excess = 0


class _Transport:
    """A transport whose `close` waits for the client's end if part of its request is unread.

    Otherwise the system resets the connection, and the client loses the answer.
    """

    def __init__(self, transport: asyncio.Transport, conn: h11.Connection) -> None:
        self._transport = transport
        self._conn = conn
        self.lingers = False
        self.ended = False  # the client sends no more
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.ended or self.is_closing() or not self._is_unread():
            self._transport.close()
            return
        self.lingers = True
        self._transport.write_eof()
        self._transport.resume_reading()

    def _is_unread(self) -> bool:
        broken_off = self._conn.their_state in (h11.SEND_BODY, h11.ERROR)
        return broken_off or bool(self._conn.trailing_data[0])


class PatientProtocol(H11Protocol):
    """Ends a connection whose client neither sends a whole request's head nor reads its answer.

    uvicorn's keep-alive timeout holds only between an answer and the next byte: it bounds neither
    the first request, nor one that comes byte by byte, nor the flush of what nobody reads.

    uvicorn takes the end of what a client sends for the end of the client. Here a client of
    HTTP/1.1 still gets its answer.
    """

    patience_s: ClassVar[float] = 60.0
    """Without progress, until twice that at most; as web servers usually wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        most = self.config.h11_max_incomplete_event_size
        assert most is not None
        self.conn = _Connection(h11.SERVER, most)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._probing: asyncio.TimerHandle | None = None
        self._held = _Transport(transport, self.conn)
        super().connection_made(cast(asyncio.Transport, self._held))
        self._pauses = 0
        self._looks = 0  # at the head of one request
        self._waited_for = self._waits_for()
        self._timer = self.loop.call_later(self.patience_s, self._look)

    def data_received(self, data: bytes) -> None:
        if not self._held.lingers:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for an answer that is due."""
        self._held.ended = True
        return self._probe()

    def shutdown(self) -> None:
        """Wait for answers that are due alone, not for what clients still send."""
        cycle = self.cycle
        if self._held.lingers or cycle is None or cycle.response_complete:
            self._held.ended = True
            self.transport.close()
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held.ended and not self._probe():
            self.transport.close()

    def _probe(self, pause_s: float = _PROBES_S[0]) -> bool:
        """Write, as long as an answer is due, what tells only whether the client has gone.

        Events may be far between, so a stream needs it, too. HTTP/1.0 has nothing of the kind.
        """
        if self._probing is not None:
            self._probing.cancel()
        due = self._answer_due()
        if due:
            if not self.cycle.response_started:
                self.transport.write(_CONTINUE)
            elif _STREAMED in self.cycle.scope["extensions"] and not self.flow.write_paused:
                self.transport.write(_COMMENT)
            longer_s = min(2 * pause_s, _PROBES_S[1])
            self._probing = self.loop.call_later(pause_s, self._probe, longer_s)
        return due

    def _answer_due(self) -> bool:
        cycle = self.cycle
        return (
            cycle is not None
            and not (cycle.more_body or cycle.response_complete or self.transport.is_closing())
            and cycle.scope["http_version"] == "1.1"
        )

    def handle_events(self) -> None:
        former = self.cycle
        super().handle_events()
        if (cycle := self.cycle) is not former and cycle.scope["http_version"] == "1.1":
            scope: dict[str, Any] = cast(dict[str, Any], cycle.scope)
            # Before its task has its first turn; weak, since it has the scope.
            scope["extensions"] = {_BODY: weakref.ref(cycle)}
        self._refuse_junk()

    def _refuse_junk(self) -> None:
        """Answer what is no request, at whose first line h11 looks once its head is whole."""
        if self.conn.their_state is not h11.IDLE:
            self._looks = 0
        elif self._looks < _MAX_LOOKS and not self.transport.is_closing():
            self._looks += 1
            line, ended, _ = self.conn.trailing_data[0].partition(b"\n")
            if not _LINE_BEGUN.fullmatch(line) or (ended and b" HTTP/" not in line):
                self.send_400_response("Invalid HTTP request received.")

    def send_400_response(self, msg: str) -> None:
        """Answer a broken request where no answer has begun; the application sends none then."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            with contextlib.suppress(h11.LocalProtocolError):  # the answer to HEAD has no body
                super().send_400_response(msg)
        if not self.transport.is_closing():
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """Answer as if nothing had been offered, as RFC 9110, section 7.8, allows.

        Java's client offers HTTP/2 with every request, and uvicorn would write two lines each time.
        """
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._pauses += 1
        super().pause_writing()

    def _waits_for(self) -> tuple[object, ...] | None:
        """Return what the client owes, unchanged while it sends nothing; None: nothing."""
        if self.flow.write_paused or self.transport.is_closing():  # nothing is written meanwhile
            return "read", self._pauses, self.transport.get_write_buffer_size()
        if self.cycle is None or self.cycle.response_complete:
            return "ask", self.cycle
        return None

    def _look(self) -> None:
        before, self._waited_for = self._waited_for, self._waits_for()
        if before is not None and before == self._waited_for:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self.patience_s, self._look)


class DirectSend:
    """A `send` that writes the pieces of a body itself, if the server lets it.

    The layers of ASGI and h11 between take as long for a piece as all else that a gateway does for
    it. They get every other message, and the last piece.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._extensions: dict[str, Any] = scope.get("extensions", {})
        cycle: RequestResponseCycle | None = self._extensions.get(_BODY, lambda: None)()
        self._cycle = cycle

    async def __call__(self, message: Message) -> None:
        cycle = self._cycle
        if cycle is None or not (message.get("more_body") and (piece := message["body"])):
            await self._send(message)
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        self.write(piece)

    @property
    def ready(self) -> bool:
        """Tell whether `write` waits for nothing."""
        return self._cycle is not None and not self._cycle.flow.write_paused

    def write(self, piece: bytes) -> None:
        """Write a piece of a body that has begun, unless the client is gone."""
        assert self._cycle is not None
        if not self._cycle.disconnected:
            self._extensions[_STREAMED] = {}
            # A chunk of RFC 9112, section 7.1.
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
