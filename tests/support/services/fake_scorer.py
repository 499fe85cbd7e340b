"""A real ScorerService server over a table instead of a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.errors import OutriderError
from outrider.rpc.codec import logprobs_from_proto, prompt_logprobs_to_proto
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.server import GrpcServer
from outrider.rpc.status import to_status
from outrider.rpc.tasks import first_of
from outrider.v1 import common_pb2, scorer_pb2, scorer_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class Script:
    """How the fake answers: the completion of a prompt, and what goes wrong."""

    # What the model says after the prompt's first `prompt_len` tokens, to all or to each request.
    completion: Sequence[int] | Callable[[scorer_pb2.ScorerServiceGenerateRequest], Sequence[int]]
    prompt_len: int | None = None  # None: the whole prompt of each request
    finish: common_pb2.FinishReason = common_pb2.FINISH_REASON_STOP
    per_round: int = 2
    delay_s: float = 0.0
    method: str = "draft_model"  # by which all drafts are made
    together: int = 0  # nobody is answered before so many requests have run at once
    refuse: OutriderError | None = None  # at once, or where it would die
    die_after: int | None = None  # tokens sent before the stream breaks ...
    dies_as: tuple[grpc.StatusCode, str] = (grpc.StatusCode.UNAVAILABLE, "Socket closed")
    scores_prompts: bool = False
    hang_after: int | None = None  # tokens sent before nothing more comes
    held: asyncio.Event | None = None  # nothing comes after the first tokens before it is set


class Death(Exception):  # noqa: N818
    """The scorer is gone, with all of its requests."""


@dataclass
class FakeScorer(scorer_pb2_grpc.ScorerServiceServicer):
    """Keeps what it was asked; `cancelled` counts requests whose client went away."""

    script: Script
    info: scorer_pb2.GetScorerInfoResponse
    requests: list[scorer_pb2.ScorerServiceGenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    streams: int = 0  # of GenerateSteps
    cancelled: int = 0
    running: int = 0
    most_running: int = 0
    gathered: asyncio.Event = field(default_factory=asyncio.Event)
    target: str = ""
    server: GrpcServer | None = None

    async def GetScorerInfo(  # noqa: N802
        self, _request: scorer_pb2.GetScorerInfoRequest, _context: Context
    ) -> scorer_pb2.GetScorerInfoResponse:
        info = scorer_pb2.GetScorerInfoResponse(running_requests=self.running)
        info.MergeFrom(self.info)
        return info

    async def GenerateSteps(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[scorer_pb2.GenerateStepsRequest], context: Context
    ) -> None:
        """A message for each round, which a gateway cannot tell from steps."""
        self.streams += 1
        running: dict[int, asyncio.Task[None]] = {}
        down: asyncio.Queue[scorer_pb2.GenerateStepsResponse | None] = asyncio.Queue()

        async def read() -> None:
            async for message in request_iterator:
                for call_id in message.cancelled_ids:
                    if call_id in running:
                        running.pop(call_id).cancel()
                if message.HasField("begin"):
                    task = asyncio.create_task(self._row(message.begin, down))
                    running[message.begin.id] = task

        async def write() -> None:
            while True:
                response: scorer_pb2.GenerateStepsResponse | None
                try:
                    response = await asyncio.wait_for(down.get(), 0.5)
                except TimeoutError:
                    response = scorer_pb2.GenerateStepsResponse()
                if response is None:
                    raise Death
                await context.write(response)

        try:
            await first_of(read(), write())
        except Death:
            await context.abort(*self.script.dies_as)
        finally:
            for task in running.values():
                task.cancel()

    async def _row(
        self,
        begin: scorer_pb2.StepsCall,
        down: asyncio.Queue[scorer_pb2.GenerateStepsResponse | None],
    ) -> None:
        try:
            async for response in self._answer(begin.request, begin.metadata.items()):
                step = scorer_pb2.GenerateStepsResponse(
                    ids=[begin.id],
                    counts=[len(response.token_ids)],
                    token_ids=response.token_ids,
                    kinds=bytes(response.kinds),
                )
                response.ClearField("token_ids")
                response.ClearField("kinds")
                if response.ListFields():
                    step.details.add(id=begin.id, response=response)
                down.put_nowait(step)
        except OutriderError as error:
            details = scorer_pb2.StepsDetails(
                id=begin.id, status=to_status(error).SerializeToString()
            )
            down.put_nowait(scorer_pb2.GenerateStepsResponse(details=[details]))
        except Death:
            down.put_nowait(None)

    async def _answer(
        self,
        request: scorer_pb2.ScorerServiceGenerateRequest,
        metadata: Iterable[tuple[str, Any]],
    ) -> AsyncIterator[scorer_pb2.ScorerServiceGenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(metadata))
        if self.script.refuse is not None and self.script.die_after is None:
            raise self.script.refuse
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.most_running >= self.script.together:
            self.gathered.set()
        try:
            async for response in self._rounds(request):
                yield response
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _rounds(
        self, request: scorer_pb2.ScorerServiceGenerateRequest
    ) -> AsyncIterator[scorer_pb2.ScorerServiceGenerateResponse]:
        script = self.script
        done = 0 if script.prompt_len is None else len(request.prompt_token_ids) - script.prompt_len
        says = script.completion(request) if callable(script.completion) else script.completion
        left = list(says[done:])
        cut = len(left) > request.stop.max_tokens
        left = left[: request.stop.max_tokens]
        sent = rounds = accepted = 0
        last = False
        await self.gathered.wait()
        while not last:
            step = self._step(left, sent)
            await asyncio.sleep(script.delay_s)
            sent += len(step)
            rounds += bool(step)
            accepted += max(0, len(step) - 1)
            last = sent == len(left)
            kinds = [*[common_pb2.TOKEN_KIND_ACCEPTED] * (len(step) - 1)]
            kinds += [common_pb2.TOKEN_KIND_BONUS] if step else []
            response = scorer_pb2.ScorerServiceGenerateResponse(token_ids=step, kinds=kinds)
            if request.draft_trees and step:  # two nodes: the truth, and a wrong sibling
                base_len = len(request.prompt_token_ids) + sent - len(step)
                response.drafts.add(base_len=base_len, token_ids=[step[0], 0], parents=[-1, -1])
            if request.HasField("top_logprobs"):
                response.logprobs.extend(logprobs_of(t, request.top_logprobs) for t in step)
            if script.scores_prompts and rounds == 1 and request.HasField("prompt_logprobs"):
                top = request.prompt_logprobs
                told = [logprobs_of(token, top) for token in request.prompt_token_ids[1:]]
                message = prompt_logprobs_to_proto([*map(logprobs_from_proto, told)])
                response.prompt_logprobs.CopyFrom(message)
            if last:
                response.finish_reason = common_pb2.FINISH_REASON_LENGTH if cut else script.finish
            if last or request.running_stats:
                response.usage.CopyFrom(
                    common_pb2.Usage(
                        prompt_tokens=len(request.prompt_token_ids),
                        completion_tokens=sent,
                        cached_prompt_tokens=1,
                    )
                )
                response.aux_info.CopyFrom(self._account(sent, rounds, accepted))
            yield response
            if script.die_after is not None and sent >= script.die_after:
                raise script.refuse or Death
            if script.hang_after is not None and sent >= script.hang_after:
                await asyncio.sleep(3600)
            if script.held is not None:
                await script.held.wait()

    def _step(self, left: list[int], sent: int) -> list[int]:
        step = left[sent : sent + self.script.per_round]
        for limit in (self.script.die_after, self.script.hang_after):
            if limit is not None:
                step = step[: max(1, limit - sent)]
        return step

    def _account(self, sent: int, rounds: int, accepted: int) -> common_pb2.AuxInfo:
        return common_pb2.AuxInfo(
            output_len=sent,
            iter_count=rounds + 1,
            rounds=rounds,
            drafted=accepted,
            accepted=accepted,
            accepted_per_pos=[rounds] * (self.script.per_round - 1),
            k_histogram=[0] * (self.script.per_round - 1) + [rounds],
            prefill_ms=5.0,
            proposer_ids=["proposer-a"],
            scorer_id=self.info.scorer_id,
            verification="coupled",
            exact=True,
            by_method=[
                common_pb2.MethodCounts(
                    method=self.script.method, drafted=accepted, accepted=accepted
                )
            ],
        )


def logprobs_of(token_id: int, count: int) -> common_pb2.TokenLogprobs:
    """A token's: in sixteenths, so that floats are exact; token 2 is always the likeliest."""
    return common_pb2.TokenLogprobs(
        logprob=-1 - (token_id % 16) / 16,
        top_token_ids=range(2, 2 + count),
        top_logprobs=[-(n + 1) / 16 for n in range(count)],
    )


@asynccontextmanager
async def serving(
    scorer: FakeScorer, port: int = 0, host: str = "127.0.0.1", tls: TlsFiles | None = None
) -> AsyncIterator[FakeScorer]:
    """The fake on a real loopback port, `scorer.target`, healthy."""
    server = GrpcServer(
        f"{host}:{port}",
        lambda s: scorer_pb2_grpc.add_ScorerServiceServicer_to_server(scorer, s),
        ["outrider.v1.ScorerService"],
        tls=tls,
    )
    scorer.target = f"{host}:{await server.start()}"
    scorer.server = server
    await server.set_serving(True)
    try:
        yield scorer
    finally:
        await server.stop(0)
