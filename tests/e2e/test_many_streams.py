"""A thousand streams at once through a gateway, over a scorer with a simulated device.

    pytest -m slow tests/e2e/test_many_streams.py

takes a minute for each face and number of workers; OUTRIDER_SOAK_SECONDS=600 makes it ten.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
import uvloop

from benchmarks import load
from benchmarks.lib.load.connection import Connection
from benchmarks.lib.load.driver import Driver, Endpoint, Limits
from benchmarks.lib.load.tally import Bound, Stream, Tally, now
from benchmarks.lib.processes import cpu_seconds, module_child, process_tree, stopping
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc

SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "40"))
STEP_MS = float(os.environ.get("OUTRIDER_SOAK_STEP_MS", "500"))
STREAMS, BURST, STALLED, LIMIT = 1000, 4000, 8, 1500
TOKENS = 40  # so that streams end and others begin
LONG = 8000  # tokens, of clients that read nothing
CHANNELS = 32
START_S, RAMP_S = 300.0, 10.0
GROWTH = 1.05

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 3 * START_S)]


class Face(Protocol):
    """Clients of one of a gateway's APIs."""

    async def closed_loop(self, seconds: float, tally: Tally) -> float:
        """Hold `STREAMS` requests at a time, of `TOKENS` tokens, and some that read nothing.

        Returns the time in seconds until the last was answered.
        """

    async def burst(self, tally: Tally) -> float:
        """Send `BURST` requests before any answer is read; likewise."""


class HttpFace:
    def __init__(self, url: str) -> None:
        self._url = url

    async def closed_loop(self, seconds: float, tally: Tally) -> float:
        stalled = [self._stalled() for _ in range(STALLED)]
        limits = Limits(1_000_000, seconds, 300.0, STREAMS)
        try:
            return await self._driver(tally, limits).closed_loop(STREAMS, ramp_s=RAMP_S)
        finally:
            for client in stalled:
                client.close()

    async def burst(self, tally: Tally) -> float:
        begun, under_way, ended = now(), 0, asyncio.Event()
        endpoint, request = self._requests()
        buffer, dialling = bytearray(2**18), asyncio.Semaphore(64)

        def on_end(connection: Connection, failure: str | None) -> None:
            nonlocal under_way
            stream, connection.stream = connection.stream, None
            assert stream is not None
            tally.ended(stream) if failure is None else tally.failed(stream, failure)
            under_way -= 1
            if not under_way:
                ended.set()

        async def dial() -> Connection:
            async with dialling:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(buffer, tally.gaps, on_end), endpoint.address, endpoint.port
                )
            return connection

        connections = await asyncio.gather(*(dial() for _ in range(BURST)))
        for n, connection in enumerate(connections):  # in one turn: no answer is read meanwhile
            connection.send(request(n), Stream(now()), 300.0)
            under_way += 1
        tally.most_open = under_way
        await ended.wait()
        for connection in connections:
            connection.close()
        await asyncio.sleep(0.1)  # or the loop would find them closing at its own end
        return now() - begun

    def _driver(self, tally: Tally, limits: Limits) -> Driver:
        return Driver(*self._requests(), limits, tally)

    def _requests(self) -> tuple[Endpoint, Callable[[int], bytes]]:
        argv = ["--url", f"{self._url}/v1", "--rate", "1", "--max-tokens", f"{TOKENS}"]
        args = load.parser().parse_args(argv)
        endpoint = Endpoint.of(args.url, "/completions")
        return endpoint, load.requests(args, endpoint, None)

    def _stalled(self) -> socket.socket:
        """Return a client that asks for much and reads nothing."""
        host, port = self._url.removeprefix("http://").split(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": LONG}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        return client


class GrpcFace:
    def __init__(self, address: str) -> None:
        self._address = address
        self._numbers = itertools.count()
        self._open = 0

    async def closed_loop(self, seconds: float, tally: Tally) -> float:
        begun = now()
        end = begun + seconds

        async def follow(channel: grpc.aio.Channel, number: int) -> None:
            await asyncio.sleep(RAMP_S * number / STREAMS)
            while now() < end:
                await self._ask(channel, tally)

        async with self._channels() as channels:
            stalled = [self._call(channel, LONG) for channel in channels[:STALLED]]
            await asyncio.gather(*(follow(channels[n % CHANNELS], n) for n in range(STREAMS)))
            for call in stalled:
                call.cancel()
        return now() - begun

    async def burst(self, tally: Tally) -> float:
        begun = now()
        async with self._channels() as channels:
            await asyncio.gather(*(self._ask(channels[n % CHANNELS], tally) for n in range(BURST)))
        return now() - begun

    async def _ask(self, channel: grpc.aio.Channel, tally: Tally) -> None:
        stream = Stream(now())
        self._open += 1
        tally.most_open = max(tally.most_open, self._open)
        try:
            async for message in self._call(channel, TOKENS):
                stream.tokens = (stream.tokens or 0) + len(message.tokens)
                if message.text:
                    stream.seen(now(), tally.gaps)
        except grpc.aio.AioRpcError as error:
            tally.failed(stream, error.code().name)
        else:
            tally.ended(stream)
        finally:
            self._open -= 1

    def _call(self, channel: grpc.aio.Channel, tokens: int) -> Any:
        stop = common_pb2.StopParams(max_tokens=tokens)
        text = f"{next(self._numbers)} of many"
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return stub.Generate(generation_pb2.GenerateRequest(text=text, stop=stop), timeout=300.0)

    @contextlib.asynccontextmanager
    async def _channels(self) -> AsyncIterator[list[grpc.aio.Channel]]:
        """Open connections that are not shared, enough for every worker to have some."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with contextlib.AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(self._address, options=options)
                )
                for _ in range(CHANNELS)
            ]


@dataclass(frozen=True)
class Gateway:
    pid: int
    workers: int
    face: Face


@pytest.fixture(
    params=[(HttpFace, 1), (HttpFace, 2), (GrpcFace, 1), (GrpcFace, 2)],
    ids=["http-one", "http-two", "grpc-one", "grpc-two"],
)
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway of so many workers, and clients of one of its APIs."""
    face, workers = request.param
    with stopping([]) as children:

        def start(module: str, *flags: object) -> dict[str, str]:
            return module_child(module, [module, *flags], tmp_path, children).ready(START_S)

        flags = ("--step-ms", STEP_MS, "--max-num-seqs", 2 * LIMIT, "--num-speculative-tokens", 0)
        scorer = start("benchmarks.lib.streaming_scorer", *flags)["grpc"]
        limits = ("--max-in-flight", LIMIT, "--resume-timeout", 60, "--request-timeout", 1200)
        found = start("gateway", "--workers", workers, "--scorer", scorer, *limits)
        address = found["http" if face is HttpFace else "grpc"]
        yield Gateway(children[-1].pid, workers, face(address))


def resident_mib(pids: list[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(load: Coroutine[Any, Any, float]) -> float:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(load)


def test_thousand_streams_are_all_served_in_flat_memory(gateway: Gateway) -> None:
    pids = process_tree(gateway.pid)
    tally, memory, cpu = Tally(Bound(60.0, 10.0)), [], {pid: cpu_seconds([pid]) for pid in pids}

    async def sample() -> None:
        while True:
            memory.append(resident_mib(pids))
            await asyncio.sleep(1.0)

    async def watched() -> float:
        sampling = asyncio.create_task(sample())
        try:
            return await gateway.face.closed_loop(SECONDS, tally)
        finally:
            sampling.cancel()

    seconds = run(watched())
    numbers = tally.numbers(seconds)
    used = sorted(cpu_seconds([pid]) - before for pid, before in cpu.items())[-gateway.workers :]
    shown = {"memory_mib": memory[:: max(1, len(memory) // 20)], "cpu_s": used}
    print(json.dumps({**shown, **numbers}))
    assert not tally.failures
    assert len(tally.total) >= STREAMS
    assert tally.most_open == STREAMS
    assert numbers["slowest_to_median"] < 2, "none is starved"
    assert used[0] > 0.1 * used[-1], "every worker serves"
    # After the first answers, which fill pools and caches once.
    early = statistics.median(memory[len(memory) * 2 // 5 : len(memory) * 3 // 5])
    late = statistics.median(memory[len(memory) * 4 // 5 :])
    assert late < GROWTH * early + 8, f"memory grew from {early:.0f} to {late:.0f} MiB"


def test_burst_of_connections_is_accepted_or_told_429(gateway: Gateway) -> None:
    tally = Tally(Bound(60.0, 10.0))
    numbers = tally.numbers(run(gateway.face.burst(tally)))
    print(json.dumps(numbers))
    assert tally.most_open == BURST
    assert tally.failures.keys() <= {"status 429 rate_limit_exceeded", "RESOURCE_EXHAUSTED"}
    assert len(tally.total) + tally.failures.total() == BURST
    assert len(tally.total) >= LIMIT
