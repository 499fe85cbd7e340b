"""A scorer's side of the Draft stream, played by hand over a real loopback server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from outrider.errors import OutriderError
from outrider.rpc import status
from outrider.rpc.data_connection import DataPort, Offer
from outrider.rpc.frames import Frames
from outrider.rpc.server import GrpcServer
from outrider.rpc.tasks import first_of
from outrider.v1 import common_pb2, draft_pb2, scorer_pb2_grpc

WAIT_S = 30.0
Requests = AsyncIterator[draft_pb2.DraftRequest]
Context = grpc.aio.ServicerContext[Any, Any]


class Conversation:
    """One proposer's stream, from its Hello on."""

    def __init__(self, hello: draft_pb2.Hello) -> None:
        self.hello = hello
        self.received: asyncio.Queue[draft_pb2.DraftRequest] = asyncio.Queue(10_000)
        self.ended = asyncio.Event()  # the proposer closed its side, or is gone
        self._said_goodbye = asyncio.Event()
        self._outgoing: asyncio.Queue[draft_pb2.SessionBatch | None] = asyncio.Queue(10_000)

    def send(
        self,
        *,
        opens: list[draft_pb2.Open] | None = None,
        commits: list[draft_pb2.Commit] | None = None,
        closes: list[draft_pb2.Close] | None = None,
        features: list[draft_pb2.Features] | None = None,
    ) -> None:
        batch = draft_pb2.SessionBatch(
            opens=opens, commits=commits, closes=closes, features=features
        )
        self._outgoing.put_nowait(batch)

    async def written(self) -> None:
        """Returns when all that was to be sent lies in the connection."""
        async with asyncio.timeout(WAIT_S):
            await self._outgoing.join()

    def hang_up(self) -> None:
        """Ends the RPC with OK."""
        self._outgoing.put_nowait(None)

    async def next(self) -> draft_pb2.DraftRequest:
        async with asyncio.timeout(WAIT_S):
            return await self.received.get()

    async def next_blocks(self) -> list[draft_pb2.Block]:
        message = await self.next()
        assert message.HasField("blocks"), message
        return list(message.blocks.blocks)

    async def next_block(self) -> draft_pb2.Block:
        [block] = await self.next_blocks()
        return block

    async def next_lost(self) -> draft_pb2.Lost:
        message = await self.next()
        assert message.HasField("lost"), message
        return message.lost

    async def silence(self, seconds: float = 0.2) -> None:
        """Passes if nothing comes for a while."""
        await asyncio.sleep(seconds)
        assert self.received.empty(), self.received.get_nowait()

    async def hold(self, requests: Requests, context: Context, offer: Offer | None) -> None:
        """Until either side ends it; over the data connection of `offer`, if there is one."""
        if offer is None:
            return await first_of(self._read(requests), self._write(context.write))
        answer = await anext(requests, None)
        if answer is None:
            return None
        assert answer.data_connected.used, answer
        frames = offer.connected.result()

        async def write(response: draft_pb2.DraftResponse) -> None:
            await frames.write(response.SerializeToString())

        return await first_of(
            self._read(_messages(frames)), self._write(write), self._read_stream(requests)
        )

    async def _read(self, requests: Requests) -> None:
        async for request in requests:
            await self.received.put(request)
            if request.HasField("goodbye"):
                self._said_goodbye.set()

    async def _read_stream(self, requests: Requests) -> None:
        """Beside a data connection: what is left to the stream is a projection, and its end."""
        await self._read(requests)
        # Closed after Goodbye, but that came another way.
        await self._said_goodbye.wait()

    async def _write(self, write: Callable[[draft_pb2.DraftResponse], Awaitable[None]]) -> None:
        while (batch := await self._outgoing.get()) is not None:
            await write(draft_pb2.DraftResponse(sessions=batch))
            self._outgoing.task_done()


async def _messages(frames: Frames) -> Requests:
    while (data := await frames.read()) is not None:
        yield draft_pb2.DraftRequest.FromString(data)


class DraftScorer(scorer_pb2_grpc.ScorerServiceServicer):
    """Welcomes proposers, or refuses them with `refusal`; tests hold the conversations.

    They go over data connections, or without `data_connections` through gRPC.
    """

    def __init__(self, *, data_connections: bool = True) -> None:
        self.refusal: OutriderError | None = None
        self.refused = 0
        self.max_block_tokens = 512
        self.version = 1  # in Welcome
        self.wants_projection = False
        self.conversations: asyncio.Queue[Conversation] = asyncio.Queue(100)
        self.data_connections = data_connections
        self._data_port: DataPort | None = None
        self._server: GrpcServer | None = None

    async def start(
        self, port: int = 0, host: str = "127.0.0.1", unix_path: str | None = None
    ) -> str:
        """Serves; returns "host:port"."""
        if self.data_connections:
            self._data_port = DataPort(host, 0, unix_path=unix_path)
            await self._data_port.start()
        self._server = GrpcServer(
            f"{host}:{port}",
            lambda server: scorer_pb2_grpc.add_ScorerServiceServicer_to_server(self, server),
            [],
            unix_path=unix_path,
        )
        return f"{host}:{await self._server.start()}"

    async def stop(self) -> None:
        """Dies at once."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        if self._data_port is not None:
            await self._data_port.stop()
            self._data_port = None

    async def attached(self) -> Conversation:
        """The next proposer that said Hello."""
        async with asyncio.timeout(WAIT_S):
            return await self.conversations.get()

    async def Draft(self, request_iterator: Requests, context: Context) -> None:  # noqa: N802
        first = await anext(request_iterator)
        assert first.HasField("hello")
        if self.refusal is not None:
            self.refused += 1
            await status.abort(context, self.refusal)
        conversation = Conversation(first.hello)
        welcome = draft_pb2.Welcome(
            protocol_version=self.version,
            scorer_id="fake",
            max_block_tokens=self.max_block_tokens,
            wants_projection=self.wants_projection,
        )
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(conversation.ended.set)
            offer = None
            if self._data_port is not None:
                assert first.hello.data_connection
                offer = cleanup.enter_context(self._data_port.offer())
                welcome.data_connection.CopyFrom(offer.message)
            await context.write(draft_pb2.DraftResponse(welcome=welcome))
            self.conversations.put_nowait(conversation)
            await conversation.hold(request_iterator, context, offer)


def open_(
    session: int,
    prefix: list[int],
    *,
    epoch: int = 1,
    k: int = 4,
    max_len: int = 1000,
    temperature: float = 0.0,
    seed: int = 0,
    traceparent: str = "",
) -> draft_pb2.Open:
    return draft_pb2.Open(
        session=session,
        epoch=epoch,
        prefix=prefix,
        sampling=common_pb2.SamplingParams(
            temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed
        ),
        num_draft_tokens=k,
        max_len=max_len,
        traceparent=traceparent,
    )


def commit(
    session: int, base_len: int, tokens: list[int], *, epoch: int = 1, k: int = 4
) -> draft_pb2.Commit:
    return draft_pb2.Commit(
        session=session, epoch=epoch, base_len=base_len, tokens=tokens, num_draft_tokens=k
    )


def close(session: int, *, epoch: int = 1) -> draft_pb2.Close:
    return draft_pb2.Close(session=session, epoch=epoch)
