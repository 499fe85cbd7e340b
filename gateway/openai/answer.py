"""Sending an answer: whole or as events, until it is done or the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.generation import Chunk, Generator
from gateway.http_connection import direct
from gateway.openai.errors import public_error
from gateway.openai.job import Job, gather, run_job
from gateway.openai.rendering import EventStream, Rendering

_SILENCE_S = 15.0
"""Proxies end connections on which nothing came for a minute, as usual."""
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Answer(Response):
    """Runs completions and sends them, whole or as events; a disconnect cancels the work."""

    def __init__(
        self,
        generator: Generator,
        job: Job,
        rendering: Rendering,
        deadline: float,
        places: ExitStack,
        *,
        stream: bool,
    ) -> None:
        """Take over `places`, which are given back when the job has run."""
        super().__init__()
        self._generator = generator
        self._job = job
        self._rendering = rendering
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
        started = False
        events = self._rendering.stream() if self._stream else None
        send = direct(scope, send)

        async def start_stream() -> None:
            nonlocal started
            if not started:
                started = True
                await _start_stream(send)

        try:
            async with self._generator.admission.until(self._deadline):
                headers = Request(scope).headers.items()
                chunks = run_job(self._job, self._generator, self._deadline, headers)
                async with aclosing(chunks):
                    if events is not None:
                        await _send_events(chunks, events, send, start_stream)
                        return
                    completions = await gather(self._job, chunks)
                    response = JSONResponse(self._rendering.whole(completions))
        except Exception as error:
            shown = self._job.renamed(public_error(error))
            if started and events is not None:  # the status is gone: an error event, and the end
                await _send_piece(send, events.error(shown), more=False)
                return
            response = self._rendering.error(shown)
        await response(scope, receive, send)


async def _send_events(
    chunks: AsyncGenerator[tuple[int, Chunk], None],
    events: EventStream,
    send: Send,
    start: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Send the events; the status waits for the first chunk, as early errors have their own.

    It waits for `_SILENCE_S` at most: then `keep_alive` keeps proxies from ending the connection,
    as it does where chunks tell nothing for so long.
    """
    now = asyncio.get_running_loop().time
    sent = now()

    async def beat() -> None:
        await start()
        await _send_piece(send, events.keep_alive, more=True)

    async for index, chunk in _with_beats(chunks, beat):
        await start()
        data = events.piece(index, chunk)
        if data or now() - sent >= _SILENCE_S:
            await _send_piece(send, data or events.keep_alive, more=True)
            sent = now()
    await _send_piece(send, b"", more=False)


async def _with_beats(
    chunks: AsyncGenerator[tuple[int, Chunk], None], beat: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks, and call `beat` every `_SILENCE_S` until the first one has come."""
    coming = asyncio.ensure_future(anext(chunks))
    try:
        while not (await asyncio.wait({coming}, timeout=_SILENCE_S))[0]:
            await beat()
        yield coming.result()
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
    async for chunk in chunks:
        yield chunk


async def _start_stream(send: Send) -> None:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", **_SSE_HEADERS}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_piece(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def while_connected(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` for a request whose body was read. Raises `ClientDisconnect` if its client goes."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
