"""A proposer that drafts what a script tells it, over a real Draft stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc

from outrider.v1 import draft_pb2, scorer_pb2_grpc
from tests.support.services.data_wire import DataWire
from tests.support.services.scorer import TOKENIZER_HASH, VOCAB


@dataclass
class Drafted:
    """A session as the proposer knows it."""

    id: int
    epoch: int
    tokens: list[int]
    num_draft_tokens: int


Script = Callable[[Drafted], Sequence[draft_pb2.Block]]


def block(drafted: Drafted, /, token_ids: Sequence[int], **fields: object) -> draft_pb2.Block:
    """A block on what the proposer knows; `fields` override any field of the message."""
    values: dict[str, object] = {
        "session": drafted.id,
        "epoch": drafted.epoch,
        "base_len": len(drafted.tokens),
        "token_ids": token_ids,
        "draft_us": 100,
    }
    return draft_pb2.Block(**{**values, **fields})  # type: ignore[arg-type]


def follow(truth: Callable[[Sequence[int]], Sequence[int]], *, shift: int = 0) -> Script:
    """Drafts what comes next according to `truth(tokens)`, each token shifted by `shift`."""

    def script(session: Drafted) -> Sequence[draft_pb2.Block]:
        nexts = truth(session.tokens)[: session.num_draft_tokens]
        return [block(session, [(token + shift) % VOCAB for token in nexts])] if nexts else []

    return script


def hello(**fields: object) -> draft_pb2.Hello:
    values: dict[str, object] = {
        "protocol_version": 1,
        "proposer_id": "proposer-0",
        "incarnation": 1,
        "method": "draft_model",
        "model": "scripted",
        "vocab_size": VOCAB,
        "tokenizer_hash": TOKENIZER_HASH,
        "max_sessions": 64,
        "max_draft_tokens": 8,
        "max_model_len": 4096,
        "pool": "test",
        "data_connection": True,
        **fields,
    }
    return draft_pb2.Hello(**values)  # type: ignore[arg-type]


@dataclass
class ScriptedProposer:
    """Follows its sessions and answers every Open and Commit with the script's blocks.

    It takes up a data connection that it is offered.
    """

    stub: scorer_pb2_grpc.ScorerServiceAsyncStub
    script: Script
    hello: draft_pb2.Hello = field(default_factory=hello)
    opens: list[draft_pb2.Open] = field(default_factory=list)
    closes: list[draft_pb2.Close] = field(default_factory=list)
    sessions: dict[int, Drafted] = field(default_factory=dict)
    welcome: draft_pb2.Welcome | None = None
    data: DataWire | None = None
    error: grpc.aio.AioRpcError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def dial(self) -> None:
        """From Hello to the first session; raises the refusal."""
        welcome = await self.say_hello()
        if welcome.HasField("data_connection"):
            data = await DataWire.take_up(welcome.data_connection)
            await self.send(data_connected=draft_pb2.DataConnected(used=True))
            self.data = data
            self.call.add_done_callback(lambda _: data.close())

    async def say_hello(self) -> draft_pb2.Welcome:
        self._writing = asyncio.Lock()
        self.call = self.stub.Draft(timeout=60)
        await self.send(hello=self.hello)
        answer = await self.call.read()
        if not isinstance(answer, draft_pb2.DraftResponse):
            await self.call  # raises the status
            raise AssertionError("ended without Welcome")
        self.welcome = answer.welcome
        return answer.welcome

    async def send(self, **message: object) -> None:
        request = draft_pb2.DraftRequest(**message)  # type: ignore[arg-type]
        async with self._writing:  # gRPC takes one write at a time
            if self.data is None or "projection" in message:
                await self.call.write(request)
            else:
                await self.data.send(request)

    async def run(self) -> None:
        """Until the stream ends."""
        try:
            while (answer := await self._read()) is not None:
                blocks = [
                    b for session in self._take(answer.sessions) for b in self.script(session)
                ]
                if blocks:
                    await self.send(blocks=draft_pb2.BlockBatch(blocks=blocks))
        except grpc.aio.AioRpcError as error:
            self.error = error
        except (asyncio.InvalidStateError, ConnectionError):  # a write after the end
            if self.data is not None:
                await self._keep_status()
        finally:
            if self.call.done() and await self.call.code() is not grpc.StatusCode.OK:
                with suppress(asyncio.CancelledError):
                    await self._keep_status()
            self.ended.set()

    async def _read(self) -> draft_pb2.DraftResponse | None:
        if self.data is not None and (message := await self.data.read()) is not None:
            return message
        answer = await self.call.read()  # of a data connection that has ended, it tells how
        return answer if isinstance(answer, draft_pb2.DraftResponse) else None

    async def _keep_status(self) -> None:
        try:
            await self.call.wait_for_connection()
            await self.call.read()
        except grpc.aio.AioRpcError as error:
            self.error = error

    def _take(self, batch: draft_pb2.SessionBatch) -> list[Drafted]:
        """Applies a batch as draft.proto says; the sessions to draft for."""
        touched: dict[int, Drafted] = {}
        for opened in batch.opens:
            self.opens.append(opened)
            session = Drafted(
                opened.session, opened.epoch, list(opened.prefix), opened.num_draft_tokens
            )
            self.sessions[session.id] = touched[session.id] = session
        for commit in batch.commits:
            known = self.sessions.get(commit.session)
            if known is not None and known.epoch == commit.epoch:
                assert commit.base_len == len(known.tokens), "a commit was lost"
                known.tokens += commit.tokens
                known.num_draft_tokens = commit.num_draft_tokens
                touched[known.id] = known
        for close in batch.closes:
            self.closes.append(close)
            known = self.sessions.get(close.session)
            if known is not None and known.epoch == close.epoch:
                del self.sessions[close.session]
                touched.pop(close.session, None)
        return list(touched.values())


@asynccontextmanager
async def proposing(proposer: ScriptedProposer) -> AsyncIterator[ScriptedProposer]:
    """Attached and drafting; hangs up (cancels the stream) at the end."""
    await proposer.dial()
    task = asyncio.create_task(proposer.run())
    try:
        yield proposer
    finally:
        proposer.call.cancel()
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(30):
                await task
