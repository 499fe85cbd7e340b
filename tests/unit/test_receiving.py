"""Requests are received a bounded number at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from outrider.errors import CapacityError, DeadlineError, InvalidRequestError
from outrider.rpc.channel import open_channel
from outrider.rpc.receiving import BoundedReceiving
from outrider.rpc.server import GrpcServer
from outrider.rpc.status import from_rpc_error

METHOD = "/t.Echo/Twice"


async def twice(request: bytes, context: Any) -> None:
    for _ in range(2):
        await context.write(request)


def register(server: grpc.aio.Server) -> None:
    handlers = {"Twice": grpc.unary_stream_rpc_method_handler(twice)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.Echo", handlers)])


@asynccontextmanager
async def serving(receiving: BoundedReceiving) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer("127.0.0.1:0", register, ["t.Echo"], receiving=receiving)
    port = await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def echoed(channel: grpc.aio.Channel) -> list[bytes]:
    return [answer async for answer in channel.unary_stream(METHOD)(b"x", timeout=20)]


async def test_a_request_has_its_answers() -> None:
    async with serving(BoundedReceiving()) as channel:
        assert await echoed(channel) == [b"x", b"x"]


async def test_one_that_does_not_come_gives_its_turn_back() -> None:
    async with serving(BoundedReceiving(at_once=1, timeout_s=0.2)) as channel:
        stalled = channel.stream_stream(METHOD)(timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stalled.read()
        assert isinstance(from_rpc_error(caught.value), DeadlineError)
        assert await echoed(channel) == [b"x", b"x"]


@pytest.mark.parametrize(("at_once", "expected"), [(0, CapacityError), (1, InvalidRequestError)])
async def test_what_cannot_be_received_is_told(at_once: int, expected: type) -> None:
    async with serving(BoundedReceiving(at_once, timeout_s=0.2 if at_once == 0 else 20)) as channel:
        call = channel.stream_stream(METHOD)(timeout=20)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(from_rpc_error(caught.value), expected)
