"""A TCP proxy on loopback that delays bytes and breaks connections, for benchmarks and tests.

async with DelayProxy("127.0.0.1:7001", "127.0.0.1:7002", delay_s=0.0005) as proxy:
... dial proxy.address, which is 127.0.0.2:7001 ...
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import sys

_CHUNK = 65536
_MAX_CONNECTIONS = 256
_COARSE_S = 0.002


class DelayProxy:
    """Forwards connections to `targets` ("host:port"), each byte at least `delay_s` later.

    It listens at the ports of the targets on `host`, another loopback address, so that a second
    port that a target names (as Welcome does) is reached through the proxy, too. `delay_s` is one
    way, and may be changed at any time. Bytes keep their order. Each direction of a connection
    holds at most `max_chunks` reads, and then stops reading.
    """

    def __init__(
        self, *targets: str, host: str = "127.0.0.2", delay_s: float = 0.0, max_chunks: int = 1024
    ) -> None:
        self.delay_s = delay_s
        self.address = f"{host}:{_port(targets[0])}"  # of the first target
        self.num_bytes = {"to": 0, "from": 0}  # forwarded to the targets and from them
        self._targets = targets
        self._host = host
        self._max_chunks = max_chunks
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> DelayProxy:
        """Listen."""
        for target in self._targets:
            accept = functools.partial(self._accept, target)
            server = await asyncio.start_server(accept, self._host, _port(target))
            self._servers.append(server)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening and break open connections."""
        for server in self._servers:
            server.close()
        await self.disconnect()
        for server in self._servers:
            await server.wait_closed()

    async def disconnect(self) -> None:
        """Break every connection and drop its buffered bytes. New ones are accepted."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        writers = [writer]
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                host = target.rpartition(":")[0]
                theirs, ours = await asyncio.open_connection(host, _port(target))
                writers.append(ours)
                directions = [
                    asyncio.create_task(self._forward(reader, ours, "to")),
                    asyncio.create_task(self._forward(theirs, writer, "from")),
                ]
                try:
                    await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for direction in directions:
                        direction.cancel()
                    await asyncio.gather(*directions, return_exceptions=True)
        finally:
            self._connections.discard(task)
            for open_writer in writers:
                open_writer.transport.abort()  # nothing that is still buffered may arrive

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str
    ) -> None:
        """Forward chunks in order, each when it is due, until either end closes."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(self._max_chunks)

        async def deliver() -> None:
            while True:
                due, chunk = await chunks.get()
                # An event loop sleeps for whole milliseconds, rounded up, so it spins at the end.
                while (left := due - loop.time()) > 0.0:  # noqa: ASYNC110
                    await asyncio.sleep(max(0.0, left - _COARSE_S))
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()
                self.num_bytes[direction] += len(chunk)

        delivering = asyncio.create_task(deliver())
        try:
            last, chunk = 0.0, b"first"
            while chunk and not delivering.done():
                chunk = await reader.read(_CHUNK)
                last = max(last, loop.time() + self.delay_s)
                await chunks.put((last, chunk))
            await delivering
        finally:
            delivering.cancel()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def main() -> None:
    """Serve a proxy, print `ready {"address": ...}`, and take commands on stdin.

    A command is a line of JSON such as {"delay_s": 0.001}, which changes fields. Its answer is the
    number of bytes so far.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, action="append", metavar="HOST:PORT")
    parser.add_argument("--host", default="127.0.0.2", help="the loopback address to listen on")
    args = parser.parse_args()
    asyncio.run(_serve(DelayProxy(*args.target, host=args.host)))


async def _serve(listening: DelayProxy) -> None:
    async with listening as proxy:
        print("ready " + json.dumps({"address": proxy.address}), flush=True)
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            for name, value in json.loads(line).items():
                setattr(proxy, name, value)
            print(json.dumps(proxy.num_bytes), flush=True)


if __name__ == "__main__":
    main()
