"""Drives requests at one endpoint: as they arrive, or as many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from benchmarks.lib.load.connection import Connection
from benchmarks.lib.load.tally import Stream, Tally, now

_BUFFER_BYTES: Final = 256 * 2**10
_CONNECT_S: Final = 10.0
_DIALLING: Final = 64
"""Connections that are opened at once. More would wait in the server's backlog."""
_PAUSE_S: Final = 0.5
"""Pause of a closed loop after a failed request."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go: an address that was looked up once, and TLS if any."""

    host: str
    port: int
    path: str
    address: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, path: str) -> Endpoint:
        """Look up a base URL such as http://127.0.0.1:8000/v1. Raises `OSError`, `ValueError`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url} is not an http or https URL")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
        return cls(parts.hostname, port, parts.path.rstrip("/") + path, address, tls)

    def request(self, body: bytes, key: str | None) -> bytes:
        """Return the bytes of a POST of JSON."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
            *([] if key is None else [f"Authorization: Bearer {key}"]),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a load."""

    requests: int
    seconds: float
    timeout_s: float
    """Time-out of one request, and of the wait for the last ones."""
    connections: int
    """Connections open at once. A request that finds none free fails."""


class Driver:
    """One load. `request(n)` returns the bytes of request `n`."""

    def __init__(
        self, endpoint: Endpoint, request: Callable[[int], bytes], limits: Limits, tally: Tally
    ) -> None:
        self._endpoint = endpoint
        self._request = request
        self._limits = limits
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._numbers = itertools.count()
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._under_way = 0
        self._dials: set[asyncio.Task[None]] = set()
        self._dialling = asyncio.Semaphore(_DIALLING)
        self._again: Callable[[str | None], None] = lambda _: None  # after each request's end
        self._quiet = asyncio.Event()

    async def open_loop(self, arrivals: Iterator[float]) -> float:
        """Send requests when they arrive; return the seconds until the last was answered."""
        begun = now()
        for at in itertools.islice(arrivals, self._limits.requests):
            if at > self._limits.seconds:
                break
            due = begun + at
            await asyncio.sleep(max(0.0, due - now()))  # streams have their turn, too
            self._tally.lag_s = max(self._tally.lag_s, now() - due)
            self._start(due)
        return await self._finish(begun)

    async def closed_loop(self, in_flight: int, ramp_s: float = 0.0) -> float:
        """Keep so many requests under way, the first ones spread over `ramp_s`; return seconds."""
        begun = now()
        end = begun + self._limits.seconds
        left = self._limits.requests
        all_begun = asyncio.Event()

        def start() -> None:
            nonlocal left
            if left > 0 and now() < end:
                left -= 1
                self._start(now())
                if not left:
                    all_begun.set()

        def again(failure: str | None) -> None:
            if failure is None:
                self._loop.call_soon(start)
            else:
                self._loop.call_later(_PAUSE_S, start)

        self._again = again
        for n in range(in_flight):
            self._loop.call_later(ramp_s * n / in_flight, start)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.seconds):
                await all_begun.wait()
        return await self._finish(begun)

    def _start(self, due: float) -> None:
        stream = Stream(due)
        if self._under_way >= self._limits.connections:
            self._tally.failed(stream, "no connection left here")
            self._loop.call_soon(self._again, "full")
            return
        self._under_way += 1
        self._quiet.clear()
        self._tally.most_open = max(self._tally.most_open, self._under_way)
        while self._idle:
            if (connection := self._idle.pop()).usable:
                self._send(connection, stream)
                return
            self._open.discard(connection)
        dial = asyncio.create_task(self._dial(stream))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

    async def _dial(self, stream: Stream) -> None:
        try:
            async with self._dialling, asyncio.timeout(_CONNECT_S):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._buffer, self._tally.gaps, self._on_end),
                    self._endpoint.address,
                    self._endpoint.port,
                    ssl=self._endpoint.tls,
                    server_hostname=self._endpoint.host if self._endpoint.tls else None,
                )
        except TimeoutError:
            self._fail(stream, "connect timeout")
        except ConnectionRefusedError:
            self._fail(stream, "connection refused")
        except OSError as error:
            self._fail(stream, f"connect: {error.strerror or type(error).__name__}")
        except asyncio.CancelledError:
            self._fail(stream, "unfinished")
            raise
        else:
            self._open.add(connection)
            self._send(connection, stream)

    def _send(self, connection: Connection, stream: Stream) -> None:
        if not connection.usable:
            self._fail(stream, "closed early")
            return
        request = self._request(next(self._numbers))
        connection.send(request, stream, self._limits.timeout_s)

    def _on_end(self, connection: Connection, failure: str | None) -> None:
        stream, connection.stream = connection.stream, None
        assert stream is not None
        if connection.usable:
            self._idle.append(connection)
        else:
            self._open.discard(connection)
        if failure is None:
            self._tally.ended(stream)
            self._ended(None)
        else:
            self._fail(stream, failure)

    def _fail(self, stream: Stream, kind: str) -> None:
        self._tally.failed(stream, kind)
        self._ended(kind)

    def _ended(self, failure: str | None) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._quiet.set()
        self._again(failure)

    async def _finish(self, begun: float) -> float:
        """Wait for what is under way as long as one request may take; return all seconds."""
        self._again = lambda _: None
        self._tally.closed_at = now()
        self._tally.open_s = self._tally.closed_at - begun
        if self._under_way:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.timeout_s + _CONNECT_S):
                    await self._quiet.wait()
        seconds = now() - begun
        await self.close()
        return seconds

    async def close(self) -> None:
        """End what is under way at once, and all connections."""
        self._again = lambda _: None
        for task in list(self._dials):
            task.cancel()
        for connection in list(self._open):
            connection.close()
        await asyncio.gather(*self._dials, return_exceptions=True)
