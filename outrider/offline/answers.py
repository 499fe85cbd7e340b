"""Answer calls by the engine of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from gateway.generation import Chunk, RequestMaker
from gateway.openai.job import Job, completions_of, make_job, num_completions
from gateway.openai.requests import ChatRequest, Request
from outrider.end_of_turn import EndOfTurn
from outrider.offline.completion import LocalAnswer, LocalCompletion, OnChunk, OnEnd
from outrider.offline.outputs import Tracker
from outrider.offline.places import Places
from outrider.offline.run import Call, Run
from scorer_service.call import Serving

_STEP_TOKENS: Final = 2048
"""Tokens of prompts that begin together where the engine does not tell how many a step takes."""


class Answers:
    """Answers calls. Used on the event loop."""

    def __init__(
        self, maker: RequestMaker, serving: Serving, places: Places, step_tokens: int
    ) -> None:
        """`step_tokens`: how many tokens a step has at most; 0: unknown."""
        self._maker = maker
        self._serving = serving
        self._places = places
        self._step_tokens = step_tokens or _STEP_TOKENS
        # All of a step in one call, later than the proposers, whom the next step waits for.
        self._deliveries = EndOfTurn(LocalCompletion.take)

    async def run(self, run: Run) -> None:
        """Answer all calls of a run. Raises the first error, and ends what still runs."""
        if not run.calls:
            return
        under_way = _UnderWay(run, self._places)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._begin(run, under_way))
                await under_way.ended
        finally:
            under_way.cancel()

    async def whole(self, body: Request) -> dict[str, Any]:
        """Return the body that the HTTP API would answer with. Raises `OutriderError`s."""
        completions = num_completions(body, self._maker)
        await self._places.take(completions)
        try:
            job = await make_job(body, self._maker, tenant="")
            chunks: list[tuple[int, Chunk]] = []
            ended = asyncio.get_running_loop().create_future()
            answer = self._answer(job, lambda *new: chunks.append(new), partial(_settle, ended))
            try:
                answer.begin()
                await ended
            finally:
                answer.cancel()
            return job.shaper.whole(completions_of(job, chunks))
        finally:
            self._places.give_back(completions)

    async def _begin(self, run: Run, under_way: _UnderWay) -> None:
        """Begin all calls, as many together as fill a step of the engine."""
        together: list[LocalAnswer] = []
        tokens = 0
        for number, call in enumerate(run.calls):
            completions = num_completions(call.body, self._maker)
            if tokens >= self._step_tokens or not self._places.free(completions):
                self._begin_together(together)
                together, tokens = [], 0
            await self._places.take(completions)
            try:
                job = await make_job(call.body, self._maker, "", call.request_id)
            except BaseException:
                self._places.give_back(completions)
                raise
            tracker = self._tracker(call, job, number)
            add, end = partial(run.feed.add, tracker), partial(under_way.end, number)
            answer = self._answer(job, add, end)
            under_way.add(number, answer, tracker, completions)
            together.append(answer)
            tokens += sum(len(request.prompt_token_ids) for request in job.work)
        self._begin_together(together)

    def _begin_together(self, answers: Iterable[LocalAnswer]) -> None:
        with self._serving.engine.between_same_steps():
            for answer in answers:
                answer.begin()

    def _answer(self, job: Job, on_chunk: OnChunk, on_end: OnEnd) -> LocalAnswer:
        tokenizer = self._maker.tokenizer
        return LocalAnswer(job, self._serving, self._deliveries, tokenizer, on_chunk, on_end)

    def _tracker(self, call: Call, job: Job, number: int) -> Tracker:
        tokenizer, prompt = self._maker.tokenizer, call.prompt
        if isinstance(call.body, ChatRequest):
            spelled = map(tokenizer.token_bytes, job.work[0].prompt_token_ids)
            prompt = b"".join(spelled).decode(errors="replace")
        return Tracker(
            job, tokenizer, request_id=call.request_id, prompt=prompt, kind=call.kind, index=number
        )


class _UnderWay:
    """The answers of a run that have begun, or are about to."""

    def __init__(self, run: Run, places: Places) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all calls are answered, or with the first error of one."""
        self._run = run
        self._places = places
        self._left = len(run.calls)
        self._running: dict[int, tuple[LocalAnswer, Tracker, int]] = {}

    def add(self, number: int, answer: LocalAnswer, tracker: Tracker, completions: int) -> None:
        """Take over a call's answer and its places."""
        self._run.begun.add(number)
        self._running[number] = answer, tracker, completions

    def end(self, number: int, error: Exception | None) -> None:
        """Note that a call is answered, or why not."""
        *_, completions = self._running.pop(number)
        self._places.give_back(completions)
        self._left -= 1
        if error is not None or not self._left:
            _settle(self.ended, error)

    def cancel(self) -> None:
        """End what still runs."""
        for answer, tracker, completions in self._running.values():
            answer.cancel()
            self._places.give_back(completions)
            if self._run.aborted and not tracker.finished:
                self._run.feed.abort(tracker)
        self._running.clear()
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # another error may have ended the run


def _settle(ended: asyncio.Future[None], error: Exception | None) -> None:
    """Note that all has ended, or with which error."""
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
