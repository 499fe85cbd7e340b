"""A data connection in raw bytes, as draft.proto describes it: nothing of the services' code."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from outrider.v1 import draft_pb2


class DataWire:
    """A proposer's end. A read that lasts longer than 10 s fails."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def dial(cls, at: int | Path, context: ssl.SSLContext | None = None) -> DataWire:
        """`at`: a port of this machine, or a Unix socket."""
        if isinstance(at, Path):
            return cls(*await asyncio.open_unix_connection(at))
        return cls(*await asyncio.open_connection("127.0.0.1", at, ssl=context))

    @classmethod
    async def take_up(cls, offer: draft_pb2.DataConnection) -> DataWire:
        """Dials and shows the key. Raises `AssertionError` if it is not welcome."""
        wire = await cls.dial(offer.port)
        assert await wire.show(offer.key)
        return wire

    async def show(self, key: bytes) -> bool:
        """Whether it is answered with the byte that says welcome, and not hung up on."""
        self._writer.write(key)
        return await self._read_exactly(1) == b"\x01"

    async def send(self, message: draft_pb2.DraftRequest) -> None:
        await self.send_bytes(framed(message.SerializeToString()))

    async def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read(self) -> draft_pb2.DraftResponse | None:
        """None once the scorer has closed it."""
        head = await self._read_exactly(4)
        data = head and await self._read_exactly(int.from_bytes(head, "little"))
        return None if data is None else draft_pb2.DraftResponse.FromString(data)

    async def until_closed(self) -> None:
        while await self.read() is not None:
            pass

    def close_writing(self) -> None:
        """As `shutdown`: nothing follows, but it still reads."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.transport.abort()

    async def _read_exactly(self, size: int) -> bytes | None:
        try:
            async with asyncio.timeout(30):
                return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            return None


def framed(data: bytes) -> bytes:
    """Behind its length."""
    return len(data).to_bytes(4, "little") + data
