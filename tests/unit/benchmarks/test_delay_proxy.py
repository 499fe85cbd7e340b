"""The proxy delays, keeps order, holds little, and breaks connections on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.lib.delay_proxy import DelayProxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo() -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()


async def dial(address: str) -> Streams:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_delay_proxy_round_trip_takes_twice_the_delay() -> None:
    async with echo() as target, DelayProxy(target, delay_s=0.02) as proxy:
        reader, writer = await dial(proxy.address)
        loop = asyncio.get_running_loop()
        for _ in range(3):
            started = loop.time()
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            assert 0.04 <= loop.time() - started < 1.0
        assert proxy.num_bytes == {"to": 12, "from": 12}
        writer.close()


async def test_delay_proxy_with_several_targets_reaches_and_counts_each() -> None:
    async with echo() as first, echo() as second, DelayProxy(first, second) as proxy:
        host = proxy.address.rpartition(":")[0]
        assert proxy.address == f"{host}:{first.rpartition(':')[2]}"
        assert host != first.rpartition(":")[0]
        for target, sent in ((first, b"one"), (second, b"and two")):
            reader, writer = await dial(f"{host}:{target.rpartition(':')[2]}")
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            writer.close()
        assert proxy.num_bytes == {"to": 10, "from": 10}


async def test_delay_proxy_when_the_delay_changes_keeps_the_order() -> None:
    async with echo() as target, DelayProxy(target) as proxy:
        reader, writer = await dial(proxy.address)
        sent = b"".join(i.to_bytes(4, "big") for i in range(500))
        for i in range(0, len(sent), 40):
            proxy.delay_s = (0.05, 0.0, 0.01)[i // 40 % 3]
            writer.write(sent[i : i + 40])
            await writer.drain()
            await asyncio.sleep(0)
        assert await reader.readexactly(len(sent)) == sent
        writer.close()


async def test_delay_proxy_with_small_buffer_passes_much_data() -> None:
    async with echo() as target, DelayProxy(target, delay_s=0.001, max_chunks=2) as proxy:
        reader, writer = await dial(proxy.address)
        sent = bytes(range(256)) * 4000
        writing = asyncio.create_task(write_all(writer, sent))
        assert await reader.readexactly(len(sent)) == sent
        await writing
        writer.close()


async def write_all(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def test_delay_proxy_after_a_broken_connection_serves_the_next() -> None:
    async with echo() as target, DelayProxy(target, delay_s=60.0) as proxy:
        reader, writer = await dial(proxy.address)
        writer.write(b"lost")
        await asyncio.sleep(0.05)
        await proxy.disconnect()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(4)
        writer.close()
        proxy.delay_s = 0.0
        reader, writer = await dial(proxy.address)
        writer.write(b"kept")
        assert await reader.readexactly(4) == b"kept"
        writer.close()
