"""Sending an answer: whole or as events, until it is done or the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.generation import Chunk, Direct, Generator
from gateway.http_connection import DirectSend
from gateway.openai.choices import Completion
from gateway.openai.errors import public_error
from gateway.openai.job import Job, completions_of, run_job
from gateway.openai.json_pieces import json_pieces
from gateway.openai.rendering import KEEP_ALIVE, EventStream, Rendering
from gateway.openai.translation import renamed
from outrider.errors import OutriderError
from outrider.rpc.tasks import first_of

T = TypeVar("T")
Refusal = Callable[[OutriderError], Response]
"""Makes the answer that says why there is none, in the API's own shape."""
Made = tuple[Job, Rendering]
_LARGE = 1000  # tokens and logprobs, some microseconds each
_SILENCE_S = 10.0
"""Proxies end connections on which nothing came for a minute, as usual."""
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class CompletionResponse(Response):
    """Runs completions and sends them, whole or as events; a disconnect cancels the work."""

    def __init__(
        self,
        generator: Generator,
        make: Callable[[], Coroutine[Any, Any, Made]],
        refusal: Refusal,
        deadline: float,
        places: ExitStack,
        *,
        stream: bool,
    ) -> None:
        """Take over `places`, which are given back before the client can know that the job has run.

        So a client that then asks anew is not refused for its own former request.

        `make` may wait until a scorer is known: a stream is kept alive meanwhile.
        """
        super().__init__()
        self._generator = generator
        self._make = make
        self._refusal = refusal
        self._deadline = deadline
        self._places = places
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._places:
            sending = asyncio.create_task(self._run(scope, receive, send))
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        made: Made | None = None
        events: EventStream | None = None
        send = DirectSend(scope, send)
        stream = _Stream(send)
        try:
            async with self._generator.admission.until(self._deadline):
                making = self._make()
                if self._stream and self._generator.config.hold_timeout_s is not None:
                    making = _beating(making, stream, KEEP_ALIVE)  # else it is short enough
                job, rendering = made = await making
                headers = Request(scope).headers.items()
                direct = None
                if self._stream:
                    events = rendering.stream()
                    direct = stream.direct(events)
                chunks = run_job(job, self._generator, self._deadline, headers, direct)
                async with aclosing(chunks):
                    if events is not None:
                        giving_back = self._giving_back(chunks, len(job.work))
                        await _send_events(giving_back, events, stream)
                        return
                    completions = completions_of(job, [each async for each in chunks])
                    large = _is_large(job, completions)
                    whole = partial(_whole, rendering, completions, large=large)
                    # Other requests go on while a large one is made.
                    response = await asyncio.to_thread(whole) if large else whole()
        except Exception as error:
            response, piece = self._failure(public_error(error), made, events)
            self._places.close()
            if stream.started:  # the status is gone: an error event, and the end
                await stream.write(piece, more=False)
                return
        self._places.close()
        await response(scope, receive, send)

    async def _giving_back(
        self, chunks: AsyncGenerator[tuple[int, Chunk], None], completions: int
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Yield the chunks, and give the places back before the last one."""
        async for index, chunk in chunks:
            completions -= chunk.ending is not None
            if not completions:
                self._places.close()
            yield index, chunk

    def _failure(
        self, error: OutriderError, made: Made | None, events: EventStream | None
    ) -> tuple[Response, bytes]:
        """Return the answer that says why there is none, and the same as an event."""
        if made is None:
            refused = self._refusal(error)
            return refused, b"event: error\ndata: %b\n\n" % bytes(refused.body)
        shown = renamed(error, made[0].names)
        return self._refusal(shown), b"" if events is None else events.error(shown)


def _is_large(job: Job, completions: Sequence[Completion]) -> bool:
    """Tell whether a whole answer takes more than some milliseconds to make, up to seconds."""
    told = 0
    for each in completions:
        scored = each.tokens[0].logprobs if each.tokens else None
        told += len(each.tokens) * (1 if scored is None else 1 + len(scored.top))
    return bool(job.shaper.prompts) or told > _LARGE


def _whole(rendering: Rendering, completions: Sequence[Completion], *, large: bool) -> Response:
    """Return the answer; of a `large` one in pieces, between which other threads have turns."""
    value = rendering.whole(completions)
    if not large:
        return JSONResponse(value)
    return Response("".join(json_pieces(value)), media_type="application/json")


class _Stream:
    """Sends a stream of events, whose status goes with the first of them."""

    def __init__(self, send: DirectSend) -> None:
        self._send = send
        self._now = asyncio.get_running_loop().time
        self._sent = 0.0
        self.started = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send events, perhaps none; without `more` the stream ends."""
        if not self.started:
            self.started = True
            self._sent = self._now()
            start = {"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}
            await self._send(start)
        if data or not more:
            self._sent = self._now()
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def direct(self, events: EventStream) -> Direct:
        """Return what sends the events of a single completion."""

        def send_now(chunk: Chunk) -> None:
            if data := self.due(events, 0, chunk):
                self._sent = self._now()
                self._send.write(data)

        return Direct(lambda: self.started and self._send.ready, send_now)

    def due(self, events: EventStream, index: int, chunk: Chunk) -> bytes:
        """Return a chunk's events.

        Without any, it is `keep_alive` after a silence in which a proxy might end the connection.
        """
        data = events.piece(index, chunk)
        silent = not data and self._now() - self._sent >= _SILENCE_S
        return events.keep_alive if silent else data


async def _send_events(
    chunks: AsyncGenerator[tuple[int, Chunk], None], events: EventStream, stream: _Stream
) -> None:
    """Send the events; the status waits for the first chunk, as early errors have their own.

    It waits for `_SILENCE_S` at most: then `keep_alive` keeps proxies from ending the connection,
    as it does where chunks tell nothing for so long.
    """
    first = await _beating(anext(chunks), stream, events.keep_alive)
    await stream.write(events.piece(*first))
    async for index, chunk in chunks:
        await stream.write(stream.due(events, index, chunk))
    await stream.write(b"", more=False)


async def _beating(work: Awaitable[T], stream: _Stream, beat: bytes) -> T:
    """Await `work` and return its result; send `beat` every `_SILENCE_S` meanwhile."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=_SILENCE_S))[0]:
            await stream.write(beat)
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def while_connected(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` for a request whose body was read. Raises `ClientDisconnect` if its client goes."""
    await first_of(work, _disconnected(request.receive))


async def _disconnected(receive: Receive) -> None:
    """Raise `ClientDisconnect` once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
