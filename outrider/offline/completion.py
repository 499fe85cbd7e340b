"""Completions of this process's engine, from request to text, without a task for each."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from gateway.generation import Chunk, Writer
from gateway.intake import GenerationRequest
from gateway.openai.job import Job
from gateway.openai.translation import renamed
from gateway.routing.rounds import Round
from gateway.thinking_budget import Reasoning
from outrider.end_of_turn import EndOfTurn
from outrider.errors import UnavailableError
from outrider.models.tokenizer import Tokenizer
from outrider.params import SamplingParams
from outrider.rpc import codec
from outrider.types import Commit, Request
from scorer_service.call import Serving
from scorer_service.sessions import Session

OnChunk = Callable[[int, Chunk], None]
"""Called with a completion's index and what is new of it; not once the answer has ended."""
OnEnd = Callable[[Exception | None], None]
"""Called once, when all completions have ended, or with the first error of one."""


class LocalAnswer:
    """The completions of one job. Used on the event loop.

    A prompt's other choices begin after the first, in whose cache they find it.
    """

    def __init__(
        self,
        job: Job,
        serving: Serving,
        deliveries: EndOfTurn[LocalCompletion],
        tokenizer: Tokenizer,
        on_chunk: OnChunk,
        on_end: OnEnd,
    ) -> None:
        self._job = job
        self._on_chunk = on_chunk
        self._on_end = on_end
        self._completions = [
            LocalCompletion(request, serving, deliveries, tokenizer, self._listen(index))
            for index, request in enumerate(job.work)
        ]
        self._left = len(job.work)

    def begin(self) -> None:
        """Hand the requests to the engine. Errors go to `on_end`."""
        for first in self._completions[:: self._job.shaper.per_prompt]:
            first.begin()

    def cancel(self) -> None:
        """End what still runs, without a further call."""
        self._left = 0
        for completion in self._completions:
            completion.cancel()

    def _listen(self, index: int) -> Callable[[Chunk | Exception], None]:
        size = self._job.shaper.per_prompt
        waiting = range(index + 1, index + size) if index % size == 0 else range(0)

        def listen(news: Chunk | Exception) -> None:
            nonlocal waiting
            if not self._left:
                return
            if isinstance(news, Exception):
                self.cancel()
                self._on_end(renamed(news, self._job.names))
                return
            self._on_chunk(index, news)
            others, waiting = waiting, range(0)
            for other in others:
                self._completions[other].begin()
            if news.ending is not None:
                self._left -= 1
                if not self._left:
                    self._on_end(None)

        return listen


class LocalCompletion:
    """One completion. Used on the event loop."""

    def __init__(
        self,
        request: GenerationRequest,
        serving: Serving,
        deliveries: EndOfTurn[LocalCompletion],
        tokenizer: Tokenizer,
        listen: Callable[[Chunk | Exception], None],
    ) -> None:
        """Tell `listen` what is new, the last chunk with its ending, or an error."""
        self._request = request
        self._serving = serving
        self._deliveries = deliveries
        self._tokenizer = tokenizer
        self._listen = listen
        self._writer: Writer
        self._reasoning: Reasoning | None = None  # of the first part, where it is bounded
        self._session: Session | None = None
        self._compiling: asyncio.Task[None] | None = None
        self._submitted = 0.0
        self._ended = False

    def begin(self) -> None:
        """Hand the request to the engine, unless it was cancelled."""
        if self._ended:
            return
        try:
            self._begin()
        except Exception as error:
            self._fail(error)

    def cancel(self) -> None:
        """End without a further call of `listen`."""
        self._ended = True
        if self._compiling is not None:
            self._compiling.cancel()
        if self._session is not None:
            self._serving.hub.abort(self._session)

    def take(self) -> None:
        """Take what the engine has committed."""
        if self._ended or self._session is None:
            return
        mailbox = self._session.mailbox
        commits = mailbox.take_some(sys.maxsize)
        try:
            if commits:
                self._commit(commits)
            if mailbox.error is not None and not self._ended:
                raise mailbox.error
        except Exception as error:
            self._fail(error)

    def _begin(self) -> None:
        request, spell = self._request, self._tokenizer.token_bytes
        self._writer = Writer(request, self._tokenizer)
        if request.thinking is None:
            self._submit(request)
            return
        self._reasoning = Reasoning(request, request.thinking, spell)
        if self._reasoning.first is None:
            self._go_on(self._reasoning)
        else:
            self._submit(self._reasoning.first)

    def _submit(self, part: GenerationRequest) -> None:
        """Hand over a part of the request, once its constraint is compiled."""
        if part.constraint is None or self._serving.constraints is None:
            self._hand_over(self._engine_request(part))
        else:
            self._compiling = asyncio.create_task(self._compile(self._engine_request(part)))

    async def _compile(self, request: Request) -> None:
        assert self._serving.constraints is not None
        try:
            self._hand_over(request, await self._serving.constraints.editor(request))
        except Exception as error:
            self._fail(error)

    def _hand_over(self, request: Request, constraint: object = None) -> None:
        serving = self._serving
        if not serving.engine.running:
            raise UnavailableError("The engine has broken down or stopped. Make another LLM.")
        self._submitted = time.perf_counter()
        self._session = serving.hub.submit(request, "", constraint)
        self._session.mailbox.on_ready = lambda: self._deliveries.add(self)

    def _engine_request(self, part: GenerationRequest) -> Request:
        unseeded = _as_sent(replace(part.sampling, seed=0))
        return Request(
            session_id=self._serving.hub.next_session_id(),
            prompt_token_ids=part.prompt_token_ids,
            sampling=replace(unseeded, seed=part.sampling.seed),
            stop=part.stop,
            speculation=part.speculation,
            running_stats=bool(part.stop_strings),
            constraint=part.constraint,
            top_logprobs=part.top_logprobs,
            prompt_logprobs=None if part.num_resumed else part.prompt_logprobs,
            num_resumed_tokens=part.num_resumed,
            tenant=part.tenant,
            # A server takes fewer at a time: it loses them if it dies.
            stream_interval=part.interval if part.stop_strings else 2 * part.interval,
            adapter=part.adapter,
            draft_trees=part.draft_trees,
        )

    def _commit(self, commits: Sequence[Commit]) -> None:
        writer, round_ = self._writer, self._round(commits)
        account, ended = writer.account, round_.finish_reason is not None
        account.observe(round_.kinds)
        if round_.usage is not None and round_.aux_info is not None:
            account.report(round_.usage, round_.aux_info)
        if ended:
            self._session = None
            account.end_segment()
        if self._reasoning is not None and self._reasoning.spent(round_):
            self._write(round_._replace(finish_reason=None))
            self._go_on(self._reasoning)
            return
        self._write(round_)

    def _go_on(self, reasoning: Reasoning) -> None:
        """Begin what follows the reasoning."""
        self._reasoning = None
        ends, rest = reasoning.rest()
        if ends is not None:
            self._writer.account.insert(len(ends.token_ids))
            self._write(ends)
        if rest is not None and not self._ended:
            self._submit(rest)

    def _write(self, round_: Round) -> None:
        if self._ended:
            return
        writer = self._writer
        chunk = writer.add(round_)
        if writer.ended:
            if (session := self._session) is not None:  # a stop string came first
                self._session = None
                self._serving.hub.abort(session)
                writer.account.end_segment()
            chunk = writer.end()
        if chunk is not None:
            self._listen(chunk)
        if writer.ended:  # not before: an error of the last chunk is told
            self._ended = True

    def _fail(self, error: Exception) -> None:
        if not self._ended:
            self.cancel()
            self._listen(error)

    def _round(self, commits: Sequence[Commit]) -> Round:
        """Return several commits as one round."""
        last = commits[-1]
        usage = aux_info = None
        if last.stats is not None:
            usage = codec.usage(last.stats)
            elapsed_ms = (time.perf_counter() - self._submitted) * 1e3
            scorer_id = self._serving.served.scorer_id
            aux_info = codec.aux_info(last.stats, cost_time_ms=elapsed_ms, scorer_id=scorer_id)
        return Round(
            tuple([token for commit in commits for token in commit.token_ids]),
            tuple([kind for commit in commits for kind in commit.kinds]),
            last.finish_reason,
            tuple([each for commit in commits for each in commit.logprobs]),
            last.stop_token_id,
            commits[0].prompt_logprobs,
            usage,
            aux_info,
            tuple([commit.draft for commit in commits if commit.draft is not None]),
        )


@lru_cache(16)
def _as_sent(sampling: SamplingParams) -> SamplingParams:
    """Return what a scorer reads: float32 values, so that texts equal those of a server."""
    return codec.sampling_from_proto(codec.sampling_to_proto(sampling), seed=0)
