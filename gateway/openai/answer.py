"""Sending an answer: whole or as events, until it is done or the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.generation import Chunk, Ending, Generator
from gateway.intake import GenerationRequest
from gateway.merge import merged, one_ahead
from gateway.openai.errors import error_body, error_response, public_error
from gateway.openai.responses import Completion, Shaper, event
from gateway.output import OutputToken
from outrider.errors import InvalidRequestError, OutriderError
from outrider.rpc.telemetry import Metadata

_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Answer(Response):
    """Runs completions and sends them, whole or as events; a disconnect cancels the work."""

    def __init__(
        self,
        generator: Generator,
        work: Sequence[GenerationRequest],
        shaper: Shaper,
        deadline: float,
        names: Mapping[str, str],
        places: ExitStack,
        *,
        stream: bool,
    ) -> None:
        """Take over `places`, which are given back when all of `work` has run.

        `names` maps parameters that a scorer may refuse to the client's names of them.
        """
        super().__init__()
        self._generator = generator
        self._work = work
        self._shaper = shaper
        self._deadline = deadline
        self._names = names
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
            started = True
            await _start_stream(send)

        try:
            async with self._generator.admission.until(self._deadline):
                chunks = merged(self._streams(Request(scope).headers.items()))
                async with aclosing(chunks):
                    if self._stream:
                        await self._send_events(chunks, send, start_stream)
                        return
                    response: Response = JSONResponse(await self._collect(chunks))
        except Exception as error:
            shown = self._renamed(public_error(error))
            if started:  # the status is gone: an error event, and the end
                await _send_piece(send, event(error_body(shown)), more=False)
                return
            response = error_response(shown)
        await response(scope, receive, send)

    def _streams(self, metadata: Metadata) -> Iterator[AsyncGenerator[Chunk, None]]:
        """Yield the completions; a prompt's other choices find it in the cache of the first."""
        size = self._shaper.per_prompt
        for start in range(0, len(self._work), size):
            yield from one_ahead(
                [
                    self._generator.generate(request, self._deadline, metadata)
                    for request in self._work[start : start + size]
                ]
            )

    async def _collect(self, chunks: AsyncGenerator[tuple[int, Chunk], None]) -> dict[str, Any]:
        tokens: list[list[OutputToken]] = [[] for _ in self._work]
        endings: dict[int, Ending] = {}
        async for index, chunk in chunks:
            tokens[index] += chunk.tokens
            if chunk.ending is not None:
                endings[index] = chunk.ending
        return self._shaper.whole(
            [Completion(tuple(mine), endings[index]) for index, mine in enumerate(tokens)]
        )

    def _renamed(self, error: OutriderError) -> OutriderError:
        param = error.param if isinstance(error, InvalidRequestError) else None
        if param is None or param not in self._names:
            return error
        name, message = self._names[param], error.message
        if message.startswith(f"{param} "):
            message = f"{name}{message.removeprefix(param)}"
        return InvalidRequestError(message, param=name)

    async def _send_events(
        self,
        chunks: AsyncGenerator[tuple[int, Chunk], None],
        send: Send,
        start: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Send the events; the status waits for the first chunk, as early errors have their own."""
        shaper = self._shaper
        shown: dict[int, int] = {}  # characters of each choice's text
        endings: dict[int, Ending] = {}
        async for index, chunk in chunks:
            if not shown:
                await start()
            data = b"" if index in shown else shaper.opening(index)
            data += shaper.piece(index, chunk, shown.get(index, 0))
            shown[index] = shown.get(index, 0) + len(chunk.text)
            if chunk.ending is not None:
                endings[index] = chunk.ending
                last = len(endings) == len(self._work)
                ordered = [endings[n] for n in sorted(endings)]
                data += shaper.end_of_choice(index, chunk.ending, ordered if last else None)
                data += shaper.end(ordered) if last else b""
            if data:
                await _send_piece(send, data, more=True)
        await _send_piece(send, b"", more=False)


async def _start_stream(send: Send) -> None:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", **_SSE_HEADERS}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_piece(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
