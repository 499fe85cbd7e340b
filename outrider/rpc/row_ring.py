"""Rows of hidden states through memory that two processes of a host share, beside their stream.

A ring buffer in a file, in the folder of the Unix socket: in memory if that is (tmpfs). The
proposer makes the file and names it in Hello; the scorer, which does not trust it, opens it only in
the folder of its own socket, and only with the key inside that Hello names. Then the name is
removed: the file is gone when both processes are, however they end.

Positions count bytes from the beginning of the stream. The scorer writes rows and says in the
message where; the proposer reads them when the message comes, and notes in the file up to where it
has read. Rows without room travel in the message. Both copy by system calls instead of mapping the
file: whoever shortens it makes reads short, and kills nobody.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outrider.errors import UnavailableError
from outrider.v1 import draft_pb2

RING_BYTES: Final = 16 * 2**20
"""As much as may be on its way to one proposer (`outrider.features`): of rounds and of prompts."""

_KEY_BYTES: Final = 32
_READ: Final = struct.Struct("<Q")  # behind the key: the position up to which was read
_ROWS_AT: Final = 4096  # in the file
_NAME: Final = re.compile(r"outrider-[0-9a-f]{16}\.rows")
_STALE_S: Final = 60.0  # a file keeps its name while its stream is dialled, not longer
_MAX_BUFFERS: Final = 1024  # of one system call (IOV_MAX)


class RingReader:
    """The proposer's end, of one stream."""

    def __init__(self, folder: Path, size: int = RING_BYTES) -> None:
        """Make the file. Raises `OSError`."""
        _sweep(folder)
        self._size = size
        self._path = folder / f"outrider-{secrets.token_hex(8)}.rows"
        self._key = secrets.token_bytes(_KEY_BYTES)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o660)
        try:
            os.write(self._file, self._key + _READ.pack(0))
        except OSError:
            self.close()
            raise

    @property
    def offer(self) -> draft_pb2.RowRing:
        """For Hello."""
        return draft_pb2.RowRing(name=self._path.name, key=self._key, size=self._size)

    def unlink(self) -> None:
        """The scorer has opened the file, or will not."""
        self._path.unlink(missing_ok=True)

    def read(self, position: int, sizes: Sequence[int]) -> list[bytes]:
        """The rows from `position` on, in parts of `sizes` bytes; their room is free then.

        Raises `UnavailableError` if they are not there.
        """
        end = position + sum(sizes)
        start = _ROWS_AT + position % self._size
        rows: list[bytes] = []
        try:
            if end - position <= self._size:
                for size in sizes:
                    rows.append(os.pread(self._file, size, start))
                    start += size
            os.pwrite(self._file, _READ.pack(end), _KEY_BYTES)
        except (OSError, struct.error) as error:
            raise UnavailableError(f"shared rows cannot be read: {error}") from error
        if [*map(len, rows)] != [*sizes]:
            raise UnavailableError("shared rows are not where the scorer said")
        return rows

    def close(self) -> None:
        os.close(self._file)
        self.unlink()


class RingWriter:
    """The scorer's end, of one stream."""

    def __init__(self, file: int, size: int) -> None:
        self._file = file
        self._size = size
        self._head = 0
        self._read = 0  # up to here
        self._failed = False

    def write(self, rows: Sequence[bytes | memoryview]) -> int | None:
        """Write all of `rows`; the position of the first. None: they have no room."""
        size = sum(map(len, rows))
        if self._failed or len(rows) > _MAX_BUFFERS:
            return None
        try:
            position = self._place(size)
            if position is None:
                return None
            if os.pwritev(self._file, rows, _ROWS_AT + position % self._size) == size:
                self._head = position + size
                return position
        except (OSError, struct.error):
            pass
        self._failed = True  # no memory is left, or the proposer has shortened the file
        return None

    def close(self) -> None:
        os.close(self._file)

    def _place(self, size: int) -> int | None:
        """Where so many bytes follow in one piece."""
        (read,) = _READ.unpack(os.pread(self._file, _READ.size, _KEY_BYTES))
        if self._read < read <= self._head:
            self._read = read
        rest = -self._head % self._size
        if self._read == self._head:  # the same memory again, while the proposer keeps up
            self._read = self._head = self._head + rest
            rest = self._size
        position = self._head + (rest if size > rest else 0)
        return position if position + size - self._read <= self._size else None


def open_ring(folder: Path, offer: draft_pb2.RowRing) -> RingWriter | None:
    """The file that a proposer offers, if `folder` is where it lies."""
    fits = _NAME.fullmatch(offer.name) and len(offer.key) == _KEY_BYTES
    if not fits or not 0 < offer.size <= RING_BYTES:
        return None
    # It may be anything of that name: a link, a pipe, a file that somebody holds a lease of.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(folder / offer.name, flags)
    except OSError:
        return None
    try:
        is_file = stat.S_ISREG(os.fstat(file).st_mode)
        if is_file and secrets.compare_digest(os.pread(file, _KEY_BYTES, 0), offer.key):
            return RingWriter(file, offer.size)
    except OSError:
        pass
    os.close(file)
    return None


def _sweep(folder: Path) -> None:
    """Remove what proposers left that were killed as they dialled."""
    with contextlib.suppress(OSError):
        for path in folder.glob("outrider-*.rows"):
            if _NAME.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _STALE_S:
                path.unlink(missing_ok=True)
