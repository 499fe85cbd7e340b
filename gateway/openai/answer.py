"""Sending an answer: whole or as events, until it is done or the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.generation import Chunk, Ending, Generator
from gateway.openai.deltas import MessageReader
from gateway.openai.errors import error_body, error_response, public_error
from gateway.openai.job import Job, collect, run_job
from gateway.openai.responses import Shown, event

_SILENCE_S = 15.0
"""Proxies end connections on which nothing came for a minute, as usual."""
_KEEP_ALIVE = b": waiting\n\n"
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Answer(Response):
    """Runs completions and sends them, whole or as events; a disconnect cancels the work."""

    def __init__(
        self,
        generator: Generator,
        job: Job,
        deadline: float,
        places: ExitStack,
        *,
        stream: bool,
    ) -> None:
        """Take over `places`, which are given back when the job has run."""
        super().__init__()
        self._generator = generator
        self._job = job
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
                    if self._stream:
                        await self._send_events(chunks, send, start_stream)
                        return
                    response: Response = JSONResponse(await collect(self._job, chunks))
        except Exception as error:
            shown = self._job.renamed(public_error(error))
            if started:  # the status is gone: an error event, and the end
                await _send_piece(send, event(error_body(shown)), more=False)
                return
            response = error_response(shown)
        await response(scope, receive, send)

    async def _send_events(
        self,
        chunks: AsyncGenerator[tuple[int, Chunk], None],
        send: Send,
        start: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Send the events; the status waits for the first chunk, as early errors have their own.

        It waits for `_SILENCE_S` at most: then comments keep proxies from ending the connection,
        as they do where chunks tell nothing for so long.
        """
        shaper = self._job.shaper
        shown: dict[int, Shown] = {}  # of each choice
        readers: dict[int, MessageReader | None] = {}
        endings: dict[int, Ending] = {}
        now = asyncio.get_running_loop().time
        sent = now()

        async def beat() -> None:
            await start()
            await _send_piece(send, _KEEP_ALIVE, more=True)

        async for index, chunk in _with_beats(chunks, beat):
            await start()
            data = b""
            if index not in shown:
                readers[index] = shaper.reader()
                data = shaper.opening(index)
            before, reader = shown.get(index, Shown()), readers[index]
            data += shaper.piece(index, chunk, before, reader)
            shown[index] = before.and_then(chunk)
            if chunk.ending is not None:
                endings[index] = chunk.ending
                last = len(endings) == len(self._job.work)
                ordered = [endings[n] for n in sorted(endings)]
                called = reader is not None and reader.called
                data += shaper.end_of_choice(
                    index, chunk.ending, ordered if last else None, called=called
                )
                data += shaper.end(ordered) if last else b""
            if data or now() - sent >= _SILENCE_S:
                await _send_piece(send, data or _KEEP_ALIVE, more=True)
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
