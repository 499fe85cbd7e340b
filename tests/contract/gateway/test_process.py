"""`python -m gateway` as its users start it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ConfigError
from outrider.rpc.channel import open_channel
from tests.support.ports import reserved_port
from tests.support.services.fake_scorer import Script, serving
from tests.support.services.gateway import fake_scorer, model_folder, running_gateway, tokens
from tests.support.waiting import until


@asynccontextmanager
async def gateway_process(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *flags), stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ready_line(process: Process) -> dict[str, str]:
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    assert line.startswith("ready ")
    fields: dict[str, str] = json.loads(line.removeprefix("ready "))
    return fields


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
async def test_process_with_open_stream_stops_quickly(signum: signal.Signals) -> None:
    async with serving(fake_scorer(Script(tokens("hello world"), hang_after=2))) as scorer:
        flags = ("--scorer", scorer.target, "--model", str(model_folder()))
        async with gateway_process(*flags, "--drain-grace-seconds", "0.5") as process:
            ready = await ready_line(process)
            assert ready["service"] == "gateway"
            async with httpx.AsyncClient(base_url=ready["http"]) as client:
                assert (await client.get("/health")).status_code == 200
                stream = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
                await until(lambda: scorer.running == 1)
                process.send_signal(signum)
                _, errors = await asyncio.wait_for(process.communicate(), 30)
                assert process.returncode == 0
                assert b"Traceback" not in errors
                answer = await stream
                assert answer.status_code == 503
                assert "shutting down" in answer.json()["error"]["message"]
        await until(lambda: scorer.running == 0)


async def test_process_when_draining_lets_open_stream_end() -> None:
    held = asyncio.Event()
    script = Script(tokens("hello world, the quick brown fox"), held=held)
    async with serving(fake_scorer(script)) as scorer:
        health = reserved_port()
        flags = ("--scorer", scorer.target, "--model", str(model_folder()))
        flags = (*flags, "--health-port", str(health), "--drain-grace-seconds", "60")
        async with gateway_process(*flags) as process:
            ready = await ready_line(process)
            async with httpx.AsyncClient(base_url=ready["http"], timeout=60) as client:
                stream = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
                await until(lambda: scorer.running == 1)
                async with open_channel(f"127.0.0.1:{health}") as channel:
                    watched = health_pb2_grpc.HealthStub(channel).Watch(
                        health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
                    )
                    assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
                    process.send_signal(signal.SIGTERM)
                    status = (await watched.read()).status
                    assert status == health_pb2.HealthCheckResponse.NOT_SERVING
                    assert not stream.done(), "at once"
                    assert await watched.read() is grpc.aio.EOF, "or the process would wait for it"
                while await takes_connections(ready["http"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                held.set()
                answer = await stream
                assert answer.status_code == 200
                assert answer.json()["choices"][0]["text"] == "hello world, the quick brown fox"
                assert answer.headers["connection"] == "close"
                with pytest.raises(httpx.ConnectError):
                    await client.get("/health")
            await asyncio.wait_for(process.communicate(), 20)  # long before the grace is over
            assert process.returncode == 0


async def takes_connections(url: str) -> bool:
    """Told by a new one: those that are there may be closed at any moment of a drain."""
    address = httpx.URL(url)
    try:
        _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_metrics_port_when_draining_still_serves() -> None:
    held = asyncio.Event()
    script = Script(tokens("hello world, the quick brown fox"), held=held)
    async with serving(fake_scorer(script)) as scorer:
        flags = ("--scorer", scorer.target, "--model", str(model_folder()))
        flags = (*flags, "--metrics-port", "0", "--drain-grace-seconds", "60")
        async with gateway_process(*flags) as process:
            ready = await ready_line(process)
            async with httpx.AsyncClient(base_url=ready["http"]) as client:
                stream = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
                await until(lambda: scorer.running == 1)
                process.send_signal(signal.SIGTERM)
                async with httpx.AsyncClient() as scraper:
                    while await takes_connections(ready["http"]):
                        metrics = (await scraper.get(ready["metrics"])).text
                        assert "outrider:gateway_requests_in_flight 1.0\n" in metrics
                    metrics = (await scraper.get(ready["metrics"])).text
                    assert not stream.done(), "the drain goes on"
                assert "outrider:gateway_requests_in_flight 1.0\n" in metrics
                held.set()
                assert (await stream).status_code == 200
            await asyncio.wait_for(process.communicate(), 10)
            assert process.returncode == 0


async def refused(*flags: str) -> str:
    """The one line on stderr of a gateway that does not start."""
    async with gateway_process(*flags) as process:
        out, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert out == b""
    progress = ("gateway: waiting for", "gateway INFO")
    lines = [line for line in errors.decode().splitlines() if not line.startswith(progress)]
    assert len(lines) == 1, lines
    return lines[0]


async def test_process_with_start_error_prints_one_line() -> None:
    nobody = ("--scorer", "127.0.0.1:1", "--start-timeout", "0.3", "--model", str(model_folder()))
    assert "must be at least 1" in await refused(*nobody, "--max-in-flight", "0")
    assert "no scorer served" in await refused(*nobody)


async def test_start_with_what_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    async def start(**config: Any) -> None:
        async with running_gateway(Script([]), **config):
            pass

    missing = tmp_path / "none"
    with pytest.raises(ConfigError, match="no model folder"):
        await start(model=str(missing))
    with pytest.raises(ConfigError, match="API key file"):
        await start(api_key_file=str(missing))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in ("http_port", "grpc_port"):
            with pytest.raises(ConfigError, match="cannot listen"):
                await start(**{port: taken.getsockname()[1]})
