"""A gateway of several processes, which its clients take for one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from outrider.process.child_process import ServiceProcess, ServiceSpec
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.support.services.fake_scorer import FakeScorer, Script, serving
from tests.support.services.gateway import fake_scorer, model_folder, tokens
from tests.support.services.up import alive, children
from tests.support.waiting import until

START_S = 120.0
TEXT = "hello world, the quick brown fox"


class Gateway:
    def __init__(self, process: ServiceProcess, ready: dict[str, str], log: list[str]) -> None:
        self.process = process
        self.http, self.grpc, self.metrics_url = (
            ready["http"],
            ready["grpc"],
            ready.get("metrics", f"{ready['http']}/metrics"),
        )
        self.log = log

    @property
    def workers(self) -> dict[int, int]:
        """Index -> process id."""
        found = {}
        for pid in children(self.process.pid):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "--worker" in argv:
                found[int(argv[argv.index("--worker") + 1].partition(":")[0])] = pid
        return found

    async def ask(self, **fields: object) -> httpx.Response:
        """Over a connection of its own, so that the kernel chooses the worker."""
        async with httpx.AsyncClient(base_url=self.http, timeout=60) as client:
            return await client.post("/v1/completions", json={"prompt": "x", **fields})

    async def metric(self, name: str) -> float:
        async with httpx.AsyncClient(timeout=60) as client:
            page = (await client.get(self.metrics_url)).text
        found = re.search(rf"^outrider:{re.escape(name)} (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def until_serving(self, num_scorers: int) -> None:
        """Until each worker has found so many scorers: each answers for itself."""
        async with asyncio.timeout(20):
            alike = 0  # in a row, over connections of their own
            while alike < 20:
                async with httpx.AsyncClient(base_url=self.http, timeout=60) as client:
                    found = (await client.get("/health")).json()["scorers_serving"]
                alike = alike + 1 if found == num_scorers else 0
                await asyncio.sleep(0 if alike else 0.05)

    async def until_told(self, name: str, value: float) -> None:
        """Until the workers have told each other, which they do at every beat."""
        async with asyncio.timeout(10):
            alike = 0  # of a kind in a row, whichever worker was asked
            while alike < 8:
                alike = alike + 1 if await self.metric(name) == value else 0
                await asyncio.sleep(0 if alike else 0.05)


@asynccontextmanager
async def gateway(*scorers: FakeScorer, flags: Sequence[str] = ()) -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        for scorer in scorers:
            await stack.enter_async_context(serving(scorer))
        log: list[str] = []
        argv = (sys.executable, "-m", "gateway", "--workers", "2", "--start-timeout", "60")
        served = ("--scorer", ",".join(scorer.target for scorer in scorers))
        spec = ServiceSpec(
            "gateway", (*argv, *served, "--model", str(model_folder()), *flags), optional=True
        )
        process = ServiceProcess(spec, lambda _, line: log.append(line))
        try:
            yield Gateway(process, await process.start(START_S), log)
        finally:
            process.kill()
            await process.wait()


async def open_streams(stack: AsyncExitStack, url: str, count: int) -> list[httpx.Response]:
    """Streams that have begun, each over a connection of its own."""

    async def one() -> httpx.Response:
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        body = {"prompt": "x", "stream": True}
        return await client.send(
            client.build_request("POST", "/v1/completions", json=body), stream=True
        )

    return await asyncio.gather(*(one() for _ in range(count)))


async def test_workers_share_ports_limit_and_metrics() -> None:
    scorer = fake_scorer(Script(tokens(TEXT), hang_after=2))
    flags = ("--max-in-flight", "10", "--drain-grace-seconds", "1", "--metrics-port", "0")
    async with gateway(scorer, flags=flags) as served, AsyncExitStack() as stack:
        assert len(served.workers) == 2
        answers = await open_streams(stack, served.http, 30)
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 10 + [429] * 20
        assert scorer.running == 10
        await served.until_told("gateway_requests_in_flight", 10)
        for _ in range(8):  # whichever is asked
            assert await served.metric("gateway_requests_in_flight") == 10
            assert await served.metric("gateway_requests_refused_total") == 20
            assert await served.metric("gateway_requests_limit") == 10
            async with httpx.AsyncClient(timeout=60) as client:
                load = await client.get(f"{served.http}/load")
            assert load.json() == {"server_load": 10}
            assert await served.metric("gateway_scorers_serving") == 1

        async with grpc.aio.insecure_channel(served.grpc) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Generate(generation_pb2.GenerateRequest(text="x"), timeout=30):
                    pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_workers_with_equal_first_pages_ask_one_scorer() -> None:
    scorers = [fake_scorer(Script(tokens(TEXT)), name) for name in ("scorer-a", "scorer-b")]
    async with gateway(*scorers) as served:
        await served.until_serving(2)
        for _ in range(12):
            assert (await served.ask()).json()["choices"][0]["text"] == TEXT
        assert sorted(len(scorer.requests) for scorer in scorers) == [0, 12]


async def test_worker_that_crashes_comes_back_and_its_counts_stay() -> None:
    async with gateway(fake_scorer(Script(tokens(TEXT)))) as served:
        for _ in range(20):
            assert (await served.ask()).status_code == 200
        before = served.workers
        counted = 'gateway_requests_total{operation="text_completion",outcome="ok"}'
        await served.until_told(counted, 20)
        os.kill(before[1], signal.SIGKILL)
        # Reaped, and not only a zombie, of which other threads may still hold the port.
        await until(lambda: not Path(f"/proc/{before[1]}").exists(), 10)
        for _ in range(10):
            assert (await served.ask()).status_code == 200, "the other one serves"
        await until(lambda: any("worker 1 is back" in line for line in served.log), START_S)
        assert served.workers[0] == before[0]
        assert served.workers[1] != before[1]
        await served.until_told(counted, 30)
        for _ in range(8):
            assert await served.metric(counted) == 30
            assert await served.metric("gateway_requests_in_flight") == 0


async def test_workers_when_draining_let_open_streams_end() -> None:
    script = Script(tokens(TEXT), per_round=1, delay_s=0.1)
    flags = ("--drain-grace-seconds", "60")
    async with gateway(fake_scorer(script), flags=flags) as served, AsyncExitStack() as stack:
        workers = served.workers.values()
        answers = await open_streams(stack, served.http, 8)
        served.process.terminate()
        for answer in answers:
            assert answer.status_code == 200
            assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(served.process.wait(), 30) == 0
        assert not any(map(alive, workers))
        assert not any("Traceback" in line for line in served.log), served.log
        with pytest.raises(httpx.ConnectError):
            await served.ask()


async def test_workers_whose_parent_is_killed_end_and_free_the_port() -> None:
    scorer = fake_scorer(Script(tokens(TEXT), hang_after=2))
    async with gateway(scorer) as served:
        workers = [*served.workers.values()]
        os.kill(workers[0], signal.SIGSTOP)  # even one that hangs
        served.process.kill()
        await until(lambda: not any(map(alive, workers)), 5)
        port = int(served.http.rpartition(":")[2])
        await until(lambda: can_bind(port), 5)


def can_bind(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


async def run(*flags: str) -> tuple[int | None, str]:
    """Exit code and last line on stderr of a gateway that does not start."""
    process: Process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "--workers", "2", *flags), stdout=PIPE, stderr=PIPE
    )
    out, errors = await asyncio.wait_for(process.communicate(), START_S)
    assert out == b""
    return process.returncode, errors.decode().splitlines()[-1]


async def test_workers_that_cannot_start_say_why(tmp_path: Path) -> None:
    async with serving(fake_scorer(Script([]))) as scorer:
        flags = ("--scorer", scorer.target, "--model", str(model_folder()))
        began = time.monotonic()
        code, line = await run(*flags, "--api-key-file", f"{tmp_path}/none")
        assert (code, "API key file" in line) == (2, True), line
        assert time.monotonic() - began < START_S
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            for flag in ("--http-port", "--grpc-port", "--metrics-port"):
                code, line = await run(*flags, flag, port)
                assert (code, "cannot listen" in line) == (2, True), line
        code, line = await run(*flags, "--workers", "0")
        assert (code, "--workers must be" in line) == (2, True), line
