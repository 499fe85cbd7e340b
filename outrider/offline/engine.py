"""A scorer's engine and the gateway's checks in this process, on an event loop of their own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
import uvloop

from gateway.config import GeneratorConfig
from gateway.generation import RequestMaker
from gateway.openai.requests import Request
from outrider.config import MAX_WAITING
from outrider.errors import ConfigError, InternalError, OutriderError, UnavailableError
from outrider.models.tokenizer import Tokenizer
from outrider.offline.answers import Answers
from outrider.offline.feed import Feed
from outrider.offline.places import Places
from outrider.offline.run import STOP_S, Call, Run
from outrider.offline.speculation import naming_config
from outrider.offline.switching import switching
from outrider.rpc.telemetry import configure
from scorer_service.config import ScorerOptions
from scorer_service.core import ScorerCore


class LocalEngine:
    """Runs requests. The public methods are thread-safe."""

    def __init__(
        self, options: ScorerOptions, tokenizer: Tokenizer, config: GeneratorConfig
    ) -> None:
        """Return when the model serves. Raises `OutriderError`s."""
        self._options = options
        self._config = config
        self.tokenizer = tokenizer
        switching.begin()
        self._loop = uvloop.new_event_loop()
        self._executor = ThreadPoolExecutor(2, "outrider-tokenizer")
        self._loop.set_default_executor(self._executor)
        self._telemetry = configure("outrider-llm")
        self._core = ScorerCore(options, self._telemetry)
        self._answers: Answers
        self._watching: asyncio.Task[None] | None = None
        self._runs: set[Run] = set()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="outrider-llm", daemon=True
        )
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        try:
            with naming_config():
                starting.result()
        except BaseException:  # an interrupt, too
            starting.cancel()
            self.close()
            raise

    def call(self, function: object, *args: object) -> None:
        """Call a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to do
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]

    def submit(self, calls: Sequence[Call], feed: Feed) -> Run:
        """Begin requests, whose outputs go to `feed`. Raises `UnavailableError` after `close`."""
        self._check_open()
        run = Run(calls, feed, self.call)
        self.call(self._begin, run)
        return run

    def answer(self, body: Request) -> Future[dict[str, Any]]:
        """Return the body that the HTTP API would answer with. The future raises its errors.

        Raises `UnavailableError` if the engine is closed.
        """
        self._check_open()
        return asyncio.run_coroutine_threadsafe(self._answers.whole(body), self._loop)

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("This LLM is closed. Make another one.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dispose(self) -> None:
        """Close without waiting on a thread that may be the engine's: for the garbage collector."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            threading.Thread(target=self.close).start()

    def close(self) -> None:
        """End all requests, and give back threads and memory."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            steps = (
                self._end_requests,
                partial(self._core.halt, STOP_S),
                partial(self.call, self._loop.stop),
                partial(self._thread.join, STOP_S),
                self._executor.shutdown,
                self._telemetry.shutdown,
                self._close_loop,
                switching.end,
                self._give_back_memory,
            )
            with contextlib.ExitStack() as closing:  # an interrupt of one step skips no other
                for step in reversed(steps):
                    closing.callback(step)

    def _end_requests(self) -> None:
        stopped = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        with contextlib.suppress(TimeoutError):
            stopped.result(STOP_S)

    def _close_loop(self) -> None:
        if not self._thread.is_alive():
            self._loop.close()

    def _give_back_memory(self) -> None:
        del self._core
        if hasattr(self, "_answers"):
            del self._answers
        gc.unfreeze()  # what the start has frozen
        gc.collect()
        torch.cuda.empty_cache()

    # On the event loop:

    async def _start(self) -> None:
        await self._core.check()
        serving = await self._core.start(None)
        if serving.served.vocab_size < self.tokenizer.needed_vocab_size:
            raise ConfigError(
                f"The tokenizer has {self.tokenizer.needed_vocab_size} tokens, the model knows "
                f"{serving.served.vocab_size}: give the model's own tokenizer."
            )
        config = replace(self._config, max_in_flight=MAX_WAITING)
        maker = RequestMaker(config, self.tokenizer, serving.served)
        self._places = Places(self._options.max_num_seqs)
        step = self._options.max_num_batched_tokens
        self._answers = Answers(maker, serving, self._places, step)
        # Ends requests that hang, also after failed steps.
        self._watching = asyncio.create_task(serving.engine.until_hung())

    async def _stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for run in [*self._runs]:
            run.cancel()
        tasks = [run.task for run in self._runs if run.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, run: Run) -> None:
        if self._closed:
            run.end(UnavailableError("This LLM was closed."))
            return
        self._runs.add(run)
        run.task = asyncio.create_task(self._answers.run(run))
        run.task.add_done_callback(lambda task: self._finish(run, task))
        if run.cancelled:
            run.task.cancel()

    def _finish(self, run: Run, task: asyncio.Task[None]) -> None:
        self._runs.discard(run)
        error: BaseException | None = None
        if not task.cancelled():
            error = task.exception()
        elif run.aborted:
            for number, call in enumerate(run.calls):
                if number not in run.begun:
                    run.feed.add_last(call.aborted(number))
        else:
            error = UnavailableError("This LLM was closed.")
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None and not isinstance(error, OutriderError):
            wrapped = InternalError(f"A request failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        run.end(error)
