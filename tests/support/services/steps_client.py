"""A client of GenerateSteps that keeps what it was told."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import OutriderError
from outrider.rpc.status import from_status
from outrider.v1 import common_pb2, scorer_pb2, scorer_pb2_grpc
from tests.support.waiting import until


@dataclass
class Received:
    """Holds what one request was told; details are merged as Generate's would be."""

    token_ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: common_pb2.PromptLogprobs | None = None
    accounts: int = 0  # messages with aux_info
    parts: int = 0  # messages of a stream of steps with tokens
    last: scorer_pb2.ScorerServiceGenerateResponse | None = None  # with the end
    error: OutriderError | None = None

    @property
    def ended(self) -> bool:
        return self.last is not None or self.error is not None

    def add(self, response: scorer_pb2.ScorerServiceGenerateResponse) -> None:
        """A message of Generate, or details."""
        self.token_ids += response.token_ids
        self.kinds += response.kinds
        self.logprobs += response.logprobs
        if response.HasField("prompt_logprobs"):
            self.prompt_logprobs = response.prompt_logprobs
        self.accounts += response.HasField("aux_info")
        if response.finish_reason:
            self.last = response


@dataclass
class StepsClient:
    """One stream. Messages are read as they come, unless `reading` is cleared."""

    call: Any
    answers: dict[int, Received] = field(default_factory=lambda: defaultdict(Received))
    messages: int = 0
    empty: int = 0
    reading: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin(
        self,
        call_id: int,
        request: scorer_pb2.ScorerServiceGenerateRequest,
        **fields: Any,
    ) -> None:
        begin = scorer_pb2.StepsCall(id=call_id, request=request, **fields)
        await self.call.write(scorer_pb2.GenerateStepsRequest(begin=begin))

    async def cancel(self, *call_ids: int) -> None:
        await self.call.write(scorer_pb2.GenerateStepsRequest(cancelled_ids=call_ids))

    async def answer(self, call_id: int) -> Received:
        """The whole answer."""
        return await self.told(call_id, lambda answer: answer.ended)

    async def told(self, call_id: int, condition: Callable[[Received], bool]) -> Received:
        await until(lambda: condition(self.answers[call_id]), 30.0)
        return self.answers[call_id]

    async def read(self) -> None:
        async for message in self.call:
            self.messages += 1
            self.take(message)
            await self.reading.wait()

    def take(self, message: scorer_pb2.GenerateStepsResponse) -> None:
        self.empty += not (message.ids or message.details)
        assert len(message.kinds) == len(message.token_ids) == sum(message.counts)
        assert len(set(message.ids)) == len(message.ids) == len(message.counts)
        assert all(message.counts)
        at = 0
        for call_id, count in zip(message.ids, message.counts, strict=True):
            answer = self.answers[call_id]
            assert not answer.ended, "nothing comes after the end"
            answer.parts += 1
            answer.token_ids += message.token_ids[at : at + count]
            answer.kinds += message.kinds[at : at + count]
            at += count
        for details in message.details:
            answer = self.answers[details.id]
            assert not answer.ended
            assert not details.response.token_ids
            answer.add(details.response)
            if details.HasField("status"):
                answer.error = from_status(details.status)


@asynccontextmanager
async def steps(stub: scorer_pb2_grpc.ScorerServiceAsyncStub) -> AsyncIterator[StepsClient]:
    """A stream that is read in the background, and cancelled at the end."""
    client = StepsClient(stub.GenerateSteps())
    client.reading.set()
    reader = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        client.call.cancel()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
