"""Peers that vanish or never come to an end, over real connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME

from outrider.rpc import channel
from outrider.rpc.channel import open_channel
from outrider.rpc.server import ClientLimits, GrpcServer
from outrider.v1 import draft_pb2, scorer_pb2_grpc
from tests.support.ports import reserved_port

DEADLINE_S = 15.0


class Stalling(scorer_pb2_grpc.ScorerServiceServicer):
    """A Draft stream on which nobody ever says anything."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def Draft(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], _context: Any
    ) -> None:
        self.begun.set()
        try:
            async for _ in request_iterator:
                pass
        finally:
            self.ended.set()


class Transport:
    """Forwards connections to a port until it is cut: then nothing arrives, not even an end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._whole.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for ends in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.create_task(self._pump(*ends)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                await self._whole.wait()
                writer.write(data)
        finally:
            writer.close()


@asynccontextmanager
async def serving(stalling: Stalling, limits: ClientLimits | None = None) -> AsyncIterator[int]:
    server = GrpcServer(
        "127.0.0.1:0",
        lambda each: scorer_pb2_grpc.add_ScorerServiceServicer_to_server(stalling, each),
        ["outrider.v1.ScorerService"],
        limits=limits,
    )
    try:
        yield await server.start()
    finally:
        await server.stop(0)


async def test_connection_when_peer_vanishes_is_noticed_by_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "_PING_MS", 200)
    stalling = Stalling()
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        wire = Transport(await stack.enter_async_context(serving(stalling)))
        address = await stack.enter_async_context(wire.laid())
        opened = await stack.enter_async_context(open_channel(address))
        call = scorer_pb2_grpc.ScorerServiceStub(opened).Draft()
        await call.write(draft_pb2.DraftRequest())
        await stalling.begun.wait()
        await asyncio.sleep(1.0)  # five pings are answered, and none is abuse
        assert not call.done()
        assert not stalling.ended.is_set()
        wire.cut()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await stalling.ended.wait()


async def test_server_with_unfinished_request_ends_it_in_time() -> None:
    limits = ClientLimits(2**20, request_s=0.2, connection_s=0.2)
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(Stalling(), limits) as port,
        open_channel(f"127.0.0.1:{port}") as opened,
    ):
        # As a client that sends the head of a call, and nothing more.
        silent: Any = opened.stream_stream("/outrider.v1.ScorerService/Generate")()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await silent.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # A client that means well does not notice that it is connected anew.
        health = health_pb2_grpc.HealthStub(opened)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)


@pytest.mark.parametrize("own_port", [False, True])
async def test_watch_of_health_is_told_the_end_and_holds_up_no_stop(own_port: bool) -> None:
    address = f"127.0.0.1:{reserved_port()}"
    server = GrpcServer("127.0.0.1:0", lambda _: None, ["a.Service"], health_address=address)
    port = await server.start()
    await server.set_serving(True)
    async with open_channel(address if own_port else f"127.0.0.1:{port}") as client:
        stub = health_pb2_grpc.HealthStub(client)
        watches = [
            stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("a.Service", "")
        ]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(DEADLINE_S):
            await server.stop(10 * DEADLINE_S)
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await watch.read() is grpc.aio.EOF


async def test_open_reflection_stream_is_ended_and_holds_up_no_stop() -> None:
    server = GrpcServer("127.0.0.1:0", lambda _: None, ["outrider.v1.DraftService"])
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as client:
        stub = reflection_pb2_grpc.ServerReflectionStub(client)
        stream = stub.ServerReflectionInfo()
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = (await stream.read()).list_services_response.service
        assert {each.name for each in services} >= {"outrider.v1.DraftService", SERVICE_NAME}
        async with asyncio.timeout(DEADLINE_S):
            await server.stop(10 * DEADLINE_S)
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_reflection_streams_that_begin_while_a_server_stops_hold_it_up_no_longer() -> None:
    server = GrpcServer("127.0.0.1:0", lambda _: None, ["outrider.v1.DraftService"])
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as client:
        stub = reflection_pb2_grpc.ServerReflectionStub(client)
        streams = [stub.ServerReflectionInfo() for _ in range(20)]
        for stream in streams:
            await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await streams[0].read()
        async with asyncio.timeout(DEADLINE_S):
            await server.stop(10 * DEADLINE_S)


async def test_calls_that_come_while_the_event_loop_is_busy_all_wait_for_it() -> None:
    server = GrpcServer("127.0.0.1:0", lambda _: None, ["a.Service"])
    port = await server.start()
    await server.set_serving(True)
    try:
        # Its calls need no event loop to be sent.
        with grpc.insecure_channel(f"127.0.0.1:{port}") as client:
            check = health_pb2_grpc.HealthStub(client).Check
            request = health_pb2.HealthCheckRequest()
            calls = [check.future(request, timeout=4 * DEADLINE_S) for _ in range(4000)]
            time.sleep(1.0)  # noqa: ASYNC251
            answers = await asyncio.to_thread(lambda: [call.result() for call in calls])
    finally:
        await server.stop(0)
    assert {each.status for each in answers} == {health_pb2.HealthCheckResponse.SERVING}


async def test_watch_of_health_address_lasts_while_the_server_drains() -> None:
    """A client begins an ended watch anew at once, thousands of times a second."""
    address = f"127.0.0.1:{reserved_port()}"
    waits, ends = asyncio.Event(), asyncio.Event()

    async def wait(_: object, __: object) -> bytes:
        waits.set()
        await ends.wait()
        return b""

    methods = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
    handler = grpc.method_handlers_generic_handler("a.Service", methods)
    server = GrpcServer(
        "127.0.0.1:0",
        lambda added: added.add_generic_rpc_handlers((handler,)),
        ["a.Service"],
        health_address=address,
    )
    port = await server.start()
    await server.set_serving(True)
    async with open_channel(f"127.0.0.1:{port}") as client, open_channel(address) as probe:
        call = asyncio.ensure_future(client.unary_unary("/a.Service/Wait")(b""))
        await asyncio.wait_for(waits.wait(), DEADLINE_S)
        stub = health_pb2_grpc.HealthStub(probe)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop(DEADLINE_S))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        new = stub.Watch(health_pb2.HealthCheckRequest(service="unknown"))
        assert (await new.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        reads = [asyncio.ensure_future(each.read()) for each in (watch, new)]
        done, _ = await asyncio.wait(reads, timeout=0.3)
        assert not done
        ends.set()
        async with asyncio.timeout(DEADLINE_S):
            await stopping
        assert [await read for read in reads] == [grpc.aio.EOF] * 2
        assert await call == b""
