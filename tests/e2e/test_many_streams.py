"""A thousand streams at once through a gateway, over a scorer without a model.

    pytest -m slow tests/e2e/test_many_streams.py

takes a minute; OUTRIDER_SOAK_SECONDS=600 makes it ten.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from benchmarks import load
from benchmarks.lib.load.driver import Driver, Endpoint, Limits
from benchmarks.lib.load.tally import Bound, Tally
from benchmarks.lib.processes import Child, process_tree, python_path, stopping

SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "40"))
STEP_MS = float(os.environ.get("OUTRIDER_SOAK_STEP_MS", "500"))
STREAMS, BURST, STALLED, LIMIT = 1000, 4000, 8, 1500
TOKENS = 40  # so that streams end and others begin
START_S = 300.0
GROWTH = 1.05

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 3 * START_S)]


@pytest.fixture(params=[1, 2], ids=["one", "two"])
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Child, str]]:
    """A gateway of so many workers: its process, and its URL."""
    with stopping([]) as children:

        def start(module: str, *flags: object) -> dict[str, str]:
            argv = [sys.executable, "-P", "-m", module, *map(str, flags)]
            children.append(Child(module, argv, tmp_path, env=python_path()))
            return children[-1].ready(START_S)

        flags = ("--step-ms", STEP_MS, "--max-num-seqs", 2 * LIMIT)
        scorer = start("benchmarks.lib.streaming_scorer", *flags)["grpc"]
        flags = ("--workers", request.param, "--max-in-flight", LIMIT, "--scorer", scorer)
        url = start("gateway", *flags, "--resume-timeout", 60, "--request-timeout", 1200)["http"]
        yield children[-1], url


def driver(url: str, tally: Tally, limits: Limits) -> Driver:
    argv = ["--url", f"{url}/v1", "--rate", "1", "--max-tokens", f"{TOKENS}"]
    args = load.parser().parse_args(argv)
    endpoint = Endpoint.of(args.url, "/completions")
    return Driver(endpoint, load.requests(args, endpoint, None), limits, tally)


def stalled(url: str) -> socket.socket:
    """A client that asks for much and reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 8000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def resident_mib(pids: list[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_thousand_streams_are_all_served_in_flat_memory(gateway: tuple[Child, str]) -> None:
    process, url = gateway
    pids = process_tree(process.pid)
    tally, memory = Tally(Bound(60.0, 10.0)), []

    async def sample() -> None:
        while True:
            memory.append(resident_mib(pids))
            await asyncio.sleep(1.0)

    async def run() -> float:
        idle = [stalled(url) for _ in range(STALLED)]
        sampling = asyncio.create_task(sample())
        limits = Limits(1_000_000, SECONDS, 300.0, STREAMS)
        try:
            return await driver(url, tally, limits).closed_loop(STREAMS, ramp_s=10.0)
        finally:
            sampling.cancel()
            for client in idle:
                client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds = runner.run(run())
    numbers = tally.numbers(seconds)
    print(json.dumps({"memory_mib": memory[:: max(1, len(memory) // 20)], **numbers}))
    assert not tally.failures
    assert len(tally.total) >= STREAMS
    assert tally.most_open == STREAMS
    assert numbers["slowest_to_median"] < 2, "none is starved"
    # After the first answers, which fill pools and caches once.
    early = statistics.median(memory[len(memory) * 2 // 5 : len(memory) * 3 // 5])
    late = statistics.median(memory[len(memory) * 4 // 5 :])
    assert late < GROWTH * early + 8, f"memory grew from {early:.0f} to {late:.0f} MiB"


def test_burst_of_connections_is_accepted_or_told_429(gateway: tuple[Child, str]) -> None:
    _, url = gateway
    tally = Tally(Bound(60.0, 10.0))
    limits = Limits(BURST, 60.0, 300.0, BURST)

    async def run() -> None:
        await driver(url, tally, limits).open_loop(iter([0.0] * BURST))

    began = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    numbers = tally.numbers(time.monotonic() - began)
    print(json.dumps(numbers))
    assert tally.most_open == BURST
    assert tally.failures.keys() <= {"status 429 rate_limit_exceeded"}
    assert len(tally.total) + tally.failures.total() == BURST
    assert len(tally.total) >= LIMIT
