"""Clients that keep a connection and do nothing with it, over a fake scorer on real ports."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from grpc.aio import UnaryStreamCall
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from gateway.http_connection import PatientProtocol
from outrider.rpc.deployment import Deployment
from tests.support.services.fake_scorer import Script
from tests.support.services.gateway import Running, running_gateway, tokens
from tests.support.waiting import until

PATIENCE_S = 0.2
DEADLINE_S = 15.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientProtocol, "patience_s", PATIENCE_S)


def completion(**body: object) -> bytes:
    text = json.dumps({"prompt": "x", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


@asynccontextmanager
async def connected(
    gateway: Running, receive_buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = gateway.http.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**10)
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    received = b""
    async with asyncio.timeout(DEADLINE_S):
        try:
            while piece := await reader.read(2**16):
                received += piece
        except ConnectionError:
            pass
    return received


@pytest.mark.parametrize("sent", [b"", HEALTH[:20]])
async def test_connection_without_request_is_closed(sent: bytes) -> None:
    async with (
        running_gateway(Script(tokens("abc"))) as gateway,
        connected(gateway) as (reader, writer),
    ):
        writer.write(sent)
        assert await read_to_end(reader) == b""


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(random.Random(5).randbytes(1500), id="random"),
        pytest.param(b"x" * 40, id="no method"),
        pytest.param(b"GET /health HTTQ", id="no version"),
        pytest.param(b"GET /health\r\n", id="HTTP/0.9"),
        pytest.param(b"GET /caf\xc3\xa9", id="no target"),
        pytest.param(b"EHLO example.org\r\n", id="another protocol"),
        pytest.param(HEALTH + b"\xff" * 9, id="behind a request"),
    ],
)
async def test_connection_with_junk_is_told_so_at_once(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientProtocol, "patience_s", 2 * DEADLINE_S)
    async with (
        running_gateway(Script(tokens("abc"))) as gateway,
        connected(gateway) as (reader, writer),
    ):
        writer.write(sent)
        answer = await read_to_end(reader)
    assert b"HTTP/1.1 400 " in answer


@pytest.mark.parametrize(
    ("method", "media"),
    [("POST", "application/json"), ("POST", "text/plain"), ("HEAD", "text/plain")],  # text: unread
)
@pytest.mark.parametrize("pause_s", [0.0, PATIENCE_S / 4])
async def test_connection_with_a_broken_body_logs_no_error(
    method: str, media: str, pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"{method} /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: {media}\r\n"
    async with running_gateway(Script(tokens("abc"))) as gateway:
        async with connected(gateway) as (reader, writer):
            writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            await asyncio.sleep(pause_s)
            writer.write(b"no number\r\n")
            answer = await read_to_end(reader)
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 ", b"HTTP/1.1 415 "))
        assert answer.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("cut", range(1, len(HEALTH)))
async def test_connection_with_a_request_in_two_parts_is_answered(cut: int) -> None:
    async with (
        running_gateway(Script(tokens("abc"))) as gateway,
        connected(gateway) as (reader, writer),
        asyncio.timeout(DEADLINE_S),
    ):
        writer.write(HEALTH[:cut])
        await asyncio.sleep(0.01)
        writer.write(HEALTH[cut:])
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 OK")


async def test_connection_with_endless_head_is_closed() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x: y\r\n")
            await asyncio.sleep(PATIENCE_S / 10)

    async with (
        running_gateway(Script(tokens("abc"))) as gateway,
        connected(gateway) as (reader, writer),
    ):
        writer.write(HEALTH + HEALTH[:-2])
        dripping = asyncio.create_task(drip(writer))
        received = await read_to_end(reader)
        dripping.cancel()
    assert received.count(b"200 OK") == 1


async def test_connection_with_slow_answer_stays_open() -> None:
    async with (
        running_gateway(Script(tokens("abcdef"), delay_s=2 * PATIENCE_S)) as gateway,
        connected(gateway) as (reader, writer),
        asyncio.timeout(DEADLINE_S),
    ):
        writer.write(completion())
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")


async def test_connection_with_unread_answer_is_cancelled() -> None:
    script = Script(tokens("abcdefgh" * 24), per_round=1)
    cancelled = {"operation": "text_completion", "outcome": "cancelled"}
    async with (
        running_gateway(script, request_timeout_s=10 * DEADLINE_S) as gateway,
        connected(gateway, receive_buffer=2**11) as (_, writer),
    ):
        writer.write(completion(stream=True, n=64, logprobs=20))
        await until(lambda: gateway.metric("gateway_requests_total", **cancelled) > 0, DEADLINE_S)


async def test_connection_closed_within_body_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_gateway(Script(tokens("abc"))) as gateway:
        async with connected(gateway) as (_, writer):
            writer.write(completion()[:-5])
        answer = await gateway.client.completions.create(model="default", prompt="x")
    assert answer.choices[0].text == "abc"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_stream_to_client_of_http_1_0_has_no_chunks() -> None:
    async with running_gateway(Script(tokens("hello world"))) as gateway:
        for version, chunked in (("1.0", False), ("1.1", True)):
            request = completion(stream=True).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
            request = request.replace(b"Host: x", b"Host: x\r\nConnection: close")
            async with connected(gateway) as (reader, writer):
                writer.write(request)
                head, _, body = (await read_to_end(reader)).partition(b"\r\n\r\n")
            assert (b"transfer-encoding: chunked" in head.lower()) == chunked
            lines = body.splitlines()
            assert (b"data: [DONE]" in lines, lines[0].startswith(b"data: ")) == (True, not chunked)
            if chunked:
                assert body.endswith(b"\r\n0\r\n\r\n")


async def test_streams_that_ended_are_not_left_to_the_garbage_collector() -> None:
    kinds = (RequestResponseCycle, UnaryStreamCall)

    def alive() -> int:
        # Not isinstance: that asks objects for their class, and some of PyTorch warn then.
        return sum(issubclass(type(each), kinds) for each in gc.get_objects())

    async with running_gateway(Script(tokens("hello world"))) as gateway:
        gc.collect()
        before = alive()
        gc.disable()  # it would find circles at last
        try:
            async with connected(gateway) as (reader, writer):
                for _ in range(20):
                    writer.write(completion(stream=True))
                    async with asyncio.timeout(DEADLINE_S):
                        await reader.readuntil(b"\r\n0\r\n\r\n")
                await until(lambda: alive() <= before + 1)  # the connection has its last one
        finally:
            gc.enable()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_sends_no_more_is_answered(stream: bool) -> None:
    async with (
        running_gateway(Script(tokens("hello world"), delay_s=0.1)) as gateway,
        connected(gateway) as (reader, writer),
    ):
        writer.write(completion(stream=stream) + HEALTH)
        writer.write_eof()
        answer = await read_to_end(reader)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"world" in answer


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_after_it_sends_no_more_is_cancelled(stream: bool) -> None:
    script = Script(tokens("hello world"), hang_after=2)
    async with running_gateway(script, request_timeout_s=10 * DEADLINE_S) as gateway:
        async with connected(gateway) as (reader, writer):
            writer.write(completion(stream=stream))
            await until(lambda: gateway.scorer.running == 1)
            if stream:
                await reader.readuntil(b"data: ")
            writer.write_eof()
            await asyncio.sleep(PATIENCE_S)
            assert gateway.scorer.running == 1
        await until(lambda: gateway.scorer.cancelled == 1, DEADLINE_S)


async def test_stream_to_a_client_that_sends_no_more_is_whole() -> None:
    script = Script(tokens("hello world"), delay_s=PATIENCE_S, per_round=1)
    async with (
        running_gateway(script) as gateway,
        connected(gateway) as (reader, writer),
    ):
        writer.write(completion(stream=True))
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write_eof()
        body = await read_to_end(reader)
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\n3\r\n:\n\n\r\n" in body
    events = [json.loads(each) for each in re.findall(rb"(?<=\ndata: ){.*(?=\n\n)", body)]
    assert "".join(each["choices"][0]["text"] for each in events) == "hello world"
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("sent", "status"),
    [(completion(prompt="x" * 2**23), b"413"), (b"no request\n" + b"x" * 2**23, b"400")],
)
async def test_client_that_still_sends_gets_its_refusal(
    sent: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientProtocol, "patience_s", DEADLINE_S)
    async with (
        running_gateway(Script(tokens("abc")), max_body_bytes=1000) as gateway,
        connected(gateway) as (reader, writer),
    ):
        writer.write(sent.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        async with asyncio.timeout(DEADLINE_S):
            await writer.drain()
        assert (await read_to_end(reader)).startswith(b"HTTP/1.1 " + status)


async def test_connection_whose_client_sends_on_for_ever_is_closed() -> None:
    async with (
        running_gateway(Script(tokens("abc"))) as gateway,
        connected(gateway) as (_, writer),
        asyncio.timeout(DEADLINE_S),
    ):
        writer.write(b"no request\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(PATIENCE_S / 10)


UNREAD = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx"
BROKEN = b"HEAD /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(HEALTH[:20], id="head in part"),
        pytest.param(HEALTH + HEALTH[:20], id="second head in part"),
        pytest.param(UNREAD, id="body in part"),
        pytest.param(b"no request\n", id="refused"),
        pytest.param(BROKEN, id="refused without an answer"),
    ],
)
async def test_client_that_owes_a_part_does_not_hold_up_the_end(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientProtocol, "patience_s", 10 * DEADLINE_S)
    now = asyncio.get_running_loop().time
    async with AsyncExitStack() as client:
        grace = Deployment(drain_grace_s=DEADLINE_S)
        async with running_gateway(Script(tokens("abc")), deployment=grace) as gateway:
            _, writer = await client.enter_async_context(connected(gateway))
            writer.write(sent)
            await asyncio.sleep(PATIENCE_S)
            began = now()
    assert now() - began < DEADLINE_S / 2


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_body_in_tiny_chunks_is_refused_before_it_takes_long() -> None:
    async with (
        running_gateway(Script(tokens("abc"))) as gateway,
        connected(gateway) as (reader, writer),
    ):
        writer.write(CHUNKED + b"1\r\n \r\n" * 10_000)
        assert (await read_to_end(reader)).startswith(b"HTTP/1.1 400 ")


async def test_body_in_chunks_is_read() -> None:
    text = json.dumps({"prompt": "x"}).encode() + b" " * 10**5
    pieces = [text[i : i + 8] for i in range(0, len(text), 8)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in [*pieces, b""])
    async with (
        running_gateway(Script(tokens("abc")), max_body_bytes=10**6) as gateway,
        connected(gateway) as (reader, writer),
        asyncio.timeout(DEADLINE_S),
    ):
        writer.write(CHUNKED + body)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_tiny_chunks_of_a_connections_former_requests_are_not_counted() -> None:
    text = json.dumps({"prompt": "x", "user": "y" * 1000}).encode()
    body = b"".join(b"1\r\n%c\r\n" % each for each in text) + b"0\r\n\r\n"
    async with (
        running_gateway(Script(tokens("abc"))) as gateway,
        connected(gateway) as (reader, writer),
        asyncio.timeout(DEADLINE_S),
    ):
        for _ in range(3):
            writer.write(CHUNKED + body)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200 ")
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
