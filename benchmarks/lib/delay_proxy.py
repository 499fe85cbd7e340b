"""A TCP proxy that makes a network out of loopback: delay, jitter, stalls, broken connections.

For benchmarks and tests. It listens on another loopback address at the ports of its targets:
where a service names a second port of the host that was dialled, as Welcome does, that port is
reached through the proxy, too. Bytes keep their order. Each direction of each connection holds at
most `max_buffered` bytes on their way; then it stops reading, as a full link does.

    async with DelayProxy("127.0.0.1:7001", "127.0.0.1:7002", delay_s=0.0005) as proxy:
        ... dial proxy.address, which is 127.0.0.2:7001, instead ...
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import sys
from collections import deque
from types import TracebackType

_CHUNK = 65536
_MAX_CONNECTIONS = 256
_COARSE_S = 0.002


class DelayProxy:
    """Forwards connections to `targets` ("host:port"), each byte at least `delay_s` later.

    It listens at their ports on `host`, which must not be theirs; Linux has all of 127.0.0.0/8.

    `delay_s` counts one way: a round trip takes twice as long. `jitter_s` is the largest extra
    delay of a chunk; a chunk stalls by `stall_s` with `stall_chance`. The fields may be changed
    while it runs.
    """

    def __init__(
        self,
        *targets: str,
        host: str = "127.0.0.2",
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        stall_chance: float = 0.0,
        stall_s: float = 0.0,
        seed: int = 0,
        max_buffered: int = 1 << 20,
    ) -> None:
        self.delay_s = delay_s
        self.jitter_s = jitter_s
        self.stall_chance = stall_chance
        self.stall_s = stall_s
        self.address = f"{host}:{_port(targets[0])}"
        """Where the first target is reached."""
        self.num_bytes = {"to": 0, "from": 0}
        """Bytes forwarded to the targets, and from them."""
        self._targets = targets
        self._host = host
        self._rng = random.Random(seed)
        self._max_buffered = max_buffered
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        for target in self._targets:
            accept = functools.partial(self._accept, target)
            server = await asyncio.start_server(accept, self._host, _port(target))
            self._servers.append(server)

    async def stop(self) -> None:
        """Stop listening and breaks what is open."""
        for server in self._servers:
            server.close()
        await self.disconnect()
        for server in self._servers:
            await server.wait_closed()

    async def disconnect(self) -> None:
        """Break every connection; what is on its way is lost. New ones are accepted."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> DelayProxy:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

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
                ways = [
                    asyncio.create_task(self._forward(reader, ours, "to")),
                    asyncio.create_task(self._forward(theirs, writer, "from")),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._connections.discard(task)
            for each in writers:
                each.transport.abort()  # nothing that is still buffered may arrive

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        """Until either end closes. A chunk leaves when its time has come, never before another."""
        loop = asyncio.get_running_loop()
        on_their_way: deque[tuple[float, bytes]] = deque()
        buffered = 0
        changed = asyncio.Event()

        async def deliver() -> None:
            nonlocal buffered
            while True:
                while not on_their_way:
                    changed.clear()
                    await changed.wait()
                due, chunk = on_their_way[0]
                # An event loop sleeps for whole milliseconds, rounded up: the last ones pass in
                # looking at the clock.
                while (left := due - loop.time()) > 0.0:  # noqa: ASYNC110
                    await asyncio.sleep(max(0.0, left - _COARSE_S))
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()
                on_their_way.popleft()
                self.num_bytes[way] += len(chunk)
                buffered -= len(chunk)
                changed.set()

        delivering = asyncio.create_task(deliver())
        try:
            last = 0.0
            while not delivering.done():
                while buffered >= self._max_buffered:
                    changed.clear()
                    await changed.wait()
                chunk = await reader.read(_CHUNK)
                last = max(last, loop.time() + self._delay())
                on_their_way.append((last, chunk))
                buffered += len(chunk)
                changed.set()
                if not chunk:
                    await delivering
        finally:
            delivering.cancel()

    def _delay(self) -> float:
        delay = self.delay_s + self._rng.random() * self.jitter_s
        if self.stall_chance and self._rng.random() < self.stall_chance:
            delay += self.stall_s
        return delay


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def main() -> None:
    """A proxy as a process: prints `ready {"address": ...}`; its stdin's lines are commands.

    A line is JSON: {"delay_s": 0.001} changes fields; the answer is the bytes so far.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, action="append", metavar="HOST:PORT")
    parser.add_argument("--host", default="127.0.0.2", help="the loopback address to listen on")
    args = parser.parse_args()
    asyncio.run(_serve(DelayProxy(*args.target, host=args.host)))


async def _serve(proxy: DelayProxy) -> None:
    await proxy.start()
    print("ready " + json.dumps({"address": proxy.address}), flush=True)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        for name, value in json.loads(line).items():
            setattr(proxy, name, value)
        print(json.dumps(proxy.num_bytes), flush=True)
    await proxy.stop()


if __name__ == "__main__":
    main()
