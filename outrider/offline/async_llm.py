"""`AsyncLLM`: a model in this process, for programs with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
import weakref
from collections.abc import AsyncGenerator
from typing import Any, Self

from outrider.errors import InvalidRequestError
from outrider.offline.feed import Feed
from outrider.offline.llm import LoadedModel, Prompt
from outrider.offline.outputs import RequestOutput
from outrider.offline.params import SamplingParams
from outrider.offline.run import Run


class AsyncLLM:
    """A model in this process; the arguments are those of `LLM`.

    Requests run together, whichever event loops they come from.
    """

    def __init__(self, model: str, tokenizer: str | None = None, **arguments: Any) -> None:
        self._model = LoadedModel(model, tokenizer, arguments)
        self._dispose = weakref.finalize(self, self._model.engine.dispose)
        self._runs: dict[str, Run] = {}

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what `sampling_params.output_kind` says, as it comes: by default, all so far.

        Closing the generator ends the request. Raises `OutriderError`s.
        """
        params = sampling_params or SamplingParams()
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._runs:
            raise InvalidRequestError(
                f"A request {request_id} is under way: give each an id of its own.",
                param="request_id",
            )
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(arrived.set)

        feed = Feed(wake)
        call = self._model.completion(prompt, params, params.output_kind, request_id)
        self._runs[request_id] = run = self._model.engine.submit([call], feed)
        try:
            more = True
            while more:
                await arrived.wait()
                arrived.clear()
                outputs, more = feed.take()
                for output in outputs:
                    yield output
        finally:
            del self._runs[request_id]
            run.cancel()

    async def abort(self, request_id: str) -> None:
        """End a request, whose last output then has the finish reason "abort"."""
        run = self._runs.get(request_id)
        if run is not None:
            run.cancel(abort=True)

    def close(self) -> None:
        """End all requests, and give back threads and memory."""
        self._dispose.detach()
        self._model.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
