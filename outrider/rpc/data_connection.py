"""Sets up the plain connections between scorers and proposers (draft.proto, ADR 29).

The scorer listens on a port and, if gRPC has a Unix socket, on another one in its folder. Welcome
offers a proposer that place and a key, which is good once. A connection that shows no such key in
time is closed. The port speaks TLS where gRPC does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError
from outrider.rpc.channel import MAX_MESSAGE_BYTES
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.frames import READ_AHEAD_BYTES, Frames, FrameSocket
from outrider.rpc.targets import Target, join_address, no_unix_socket
from outrider.rpc.tls import Follower, client_context, server_context
from outrider.v1 import draft_pb2

_KEY_BYTES: Final = 32
_WELCOME: Final = b"\x01"
_KEY_TIMEOUT_S: Final = 5.0
_MAX_UNSENT_BYTES: Final = 4 * 2**20
"""Unread blocks of a scorer: several messages for a thousand sessions each."""
_MAX_STRANGERS: Final = 64
"""Connections whose key has not come yet; beyond, the oldest is closed."""

_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A peer that vanishes is noticed within 20 s, as by gRPC.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A connection that one proposer may open."""

    message: draft_pb2.DataConnection
    connected: asyncio.Future[Frames]
    """Done once the proposer has shown the key."""


class DataPort:
    """The scorer's end, from `start` to `stop`, on one event loop."""

    def __init__(
        self, host: str, port: int, *, unix_path: str | None = None, tls: TlsFiles | None = None
    ) -> None:
        """Take gRPC's Unix socket, if any: the one for these connections adds ".data"."""
        self._host = host
        self._port = port
        self._socket = None if unix_path is None else Path(f"{unix_path}.data")
        self._tls = tls
        self._contexts: Follower[ssl.SSLContext] | None = None
        self._offers: dict[bytes, Offer] = {}
        self._strangers: dict[asyncio.WriteTransport, None] = {}  # the oldest first
        self._servers: list[asyncio.Server] = []

    async def start(self) -> int:
        """Listen, and return the port. Raises `ConfigError` if it cannot."""
        context = None
        if self._tls is not None:
            self._contexts = Follower(self._tls, server_context)
            context = self._contexts.latest
            context.sni_callback = self._take_latest
        try:
            server = await asyncio.start_server(
                self._accept,
                self._host,
                self._port,
                ssl=context,
                ssl_handshake_timeout=None if context is None else _KEY_TIMEOUT_S,
                limit=READ_AHEAD_BYTES,
            )
        except OSError as error:
            raise ConfigError(
                f"--data-port: cannot listen on {join_address(self._host, self._port)} "
                f"({error.strerror}). Choose another, or 0 for a free one."
            ) from error
        self._servers.append(server)
        self._port = server.sockets[0].getsockname()[1]
        if self._socket is not None:
            try:
                beside = await asyncio.start_unix_server(
                    self._accept, self._socket, limit=READ_AHEAD_BYTES
                )
            except OSError as error:
                raise no_unix_socket(self._socket) from error
            self._servers.append(beside)
        return self._port

    async def stop(self) -> None:
        """Stop listening. The users of connections close them."""
        for server in self._servers:
            name = server.sockets[0].getsockname()
            server.close()
            if isinstance(name, str):  # of a Unix socket
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
        self._servers.clear()

    @contextlib.contextmanager
    def offer(self) -> Iterator[Offer]:
        """Offer a connection, which is closed at the end of the context."""
        message = draft_pb2.DataConnection(
            port=self._port,
            socket="" if self._socket is None else self._socket.name,
            key=secrets.token_bytes(_KEY_BYTES),
        )
        offer = Offer(message, asyncio.get_running_loop().create_future())
        self._offers[message.key] = offer
        try:
            yield offer
        finally:
            self._offers.pop(message.key, None)
            if offer.connected.done():
                offer.connected.result().close()

    def _take_latest(self, handshake: ssl.SSLObject, _name: str, _first: ssl.SSLContext) -> None:
        # The listener's own context would keep the certificates that it began with.
        assert self._contexts is not None
        self._contexts.fetch()
        handshake.context = self._contexts.latest

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offer = None
        self._strangers[writer.transport] = None
        if len(self._strangers) > _MAX_STRANGERS:
            first = next(iter(self._strangers))
            del self._strangers[first]
            first.abort()
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, OSError):
            async with asyncio.timeout(_KEY_TIMEOUT_S):
                offer = self._offers.pop(await reader.readexactly(_KEY_BYTES), None)
        self._strangers.pop(writer.transport, None)
        if offer is None:
            writer.transport.abort()
            return
        writer.write(_WELCOME)
        offer.connected.set_result(Frames(reader, writer, MAX_MESSAGE_BYTES))


def connect(
    target: Target, offer: draft_pb2.DataConnection, tls: TlsFiles | None, timeout_s: float
) -> FrameSocket:
    """Open the connection that a scorer offers, which was dialled as `target`.

    Each step may take `timeout_s`. Raises `OSError` if the scorer cannot be reached that way, and
    `ConfigError` for TLS files that cannot be read.
    """
    with contextlib.ExitStack() as undo:
        connected = _open(undo, target, offer, tls, timeout_s)
        connected.sendall(offer.key)
        if connected.recv(len(_WELCOME)) != _WELCOME:
            raise ConnectionRefusedError("the key is not known there")
        undo.pop_all()
    return FrameSocket(connected, MAX_MESSAGE_BYTES, _MAX_UNSENT_BYTES)


def _open(
    undo: contextlib.ExitStack,
    target: Target,
    offer: draft_pb2.DataConnection,
    tls: TlsFiles | None,
    timeout_s: float,
) -> socket.socket:
    """Return the connected socket, which `undo` closes."""
    if target.socket_path is not None:
        # The scorer may not choose the folder.
        path = Path(target.socket_path).parent / Path(offer.socket).name
        connected = undo.enter_context(socket.socket(socket.AF_UNIX))
        connected.settimeout(timeout_s)
        connected.connect(str(path))
        return connected
    host = target.address.rpartition(":")[0].strip("[]")
    connected = undo.enter_context(socket.create_connection((host, offer.port), timeout_s))
    for level, option, value in _OPTIONS:
        connected.setsockopt(level, option, value)
    if tls is None:
        return connected
    encrypted = client_context(tls).wrap_socket(
        connected, server_hostname=target.server_name or host
    )
    return undo.enter_context(encrypted)
