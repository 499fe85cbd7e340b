"""Streams that last: how many messages come over them, once all have begun."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import grpc

from benchmarks import load
from benchmarks.lib.load.driver import Driver, Endpoint, Limits
from benchmarks.lib.load.tally import Bound, Tally
from benchmarks.lib.processes import ProcessError
from outrider.v1 import common_pb2, generation_pb2

Counted = Callable[[], int]
"""Tells how many messages have come so far."""
Holding = Callable[[str, int], AbstractAsyncContextManager[Counted]]
"""Holds so many streams open at an address."""

_LONG_S: Final = 3600.0
_BEGIN_S: Final = 240.0
_TOKENS: Final = 8000
_CONNECTIONS: Final = 32
"""gRPC connections, enough for every worker of a gateway to have some."""
_GENERATE: Final = "/outrider.v1.GenerationService/Generate"


@contextlib.asynccontextmanager
async def http_streams(address: str, count: int) -> AsyncIterator[Counted]:
    """Hold `count` completions open at http://host:port. Raises `ProcessError`."""
    flags = ["--url", f"{address}/v1", "--in-flight", f"{count}", "--max-tokens", f"{_TOKENS}"]
    args = load.parser().parse_args(flags)
    endpoint = Endpoint.of(args.url, "/completions")
    tally = Tally(Bound(1.0, 1.0))
    limits = Limits(count, _LONG_S, _LONG_S, count)
    driver = Driver(endpoint, load.requests(args, endpoint, None), limits, tally)
    running = asyncio.create_task(driver.closed_loop(count))
    try:
        await _until(lambda: tally.gaps.begun == count, lambda: dict(tally.failures))
        yield lambda: tally.gaps.count
        if tally.failures:
            raise ProcessError(f"streams failed: {dict(tally.failures)}")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await driver.close()


@contextlib.asynccontextmanager
async def grpc_streams(address: str, count: int) -> AsyncIterator[Counted]:
    """Hold `count` completions open at host:port. Raises `ProcessError`."""
    options = [("grpc.use_local_subchannel_pool", 1)]  # else all share one connection
    messages = [0] * count

    async def read(channel: grpc.aio.Channel, number: int) -> None:
        request = generation_pb2.GenerateRequest(
            text=f"{number} of many", stop=common_pb2.StopParams(max_tokens=_TOKENS)
        ).SerializeToString()
        call = channel.unary_stream(_GENERATE, bytes, bytes)(request, timeout=_LONG_S)
        async for _ in call:
            messages[number] += 1

    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(min(count, _CONNECTIONS))
        ]
        reading = [asyncio.create_task(read(channels[n % len(channels)], n)) for n in range(count)]

        def failures() -> list[Any]:
            return [task.exception() for task in reading if task.done()][:1]

        try:
            await _until(lambda: all(messages), failures)
            yield lambda: sum(messages)
            if failed := failures():
                raise ProcessError(f"streams failed: {failed}")
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def _until(done: Callable[[], bool], failures: Callable[[], object]) -> None:
    """Raise `ProcessError` if streams fail, or have not begun in time."""
    try:
        async with asyncio.timeout(_BEGIN_S):
            while not done() and not failures():  # noqa: ASYNC110  # events would cost their loads
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise ProcessError(f"streams did not begin within {_BEGIN_S:g} s") from None
    if failed := failures():
        raise ProcessError(f"streams failed: {failed}")
