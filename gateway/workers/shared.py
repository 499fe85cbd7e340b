"""Numbers that each worker of a gateway tells the others, in a file that all of them map."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

from gateway.processes import Worker

_SLOT: Final = struct.Struct("=qqq")
IN_FLIGHT, HELD, BEATS = range(3)
"""Completions under way, those of them that wait for a scorer, and turns of the event loop."""
_NAME: Final = "counts"


class SharedCounts:
    """A slot for each worker, which it alone writes while it runs.

    There is no lock, since a worker that is stopped could hold it. A number is one aligned word,
    which is written as a whole.
    """

    def __init__(self, folder: Path, count: int, index: int | None = None) -> None:
        """Map the slots; `index` is the caller's own, if it is a worker."""
        self._count = count
        self._index = index
        with (folder / _NAME).open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), _SLOT.size * count)).cast("q")
        if index is not None:
            self.clear(index)

    @classmethod
    def create(cls, folder: Path, count: int) -> SharedCounts:
        """Make the file. The parent does, before its workers start."""
        (folder / _NAME).write_bytes(bytes(_SLOT.size * count))
        return cls(folder, count)

    @classmethod
    def of(cls, worker: Worker) -> SharedCounts:
        return cls(worker.folder, worker.count, worker.index)

    def tell(self, field: int, number: int) -> None:
        """Tell the others a number of this worker's."""
        assert self._index is not None
        self._words[3 * self._index + field] = number

    def elsewhere(self, field: int) -> int:
        """Return the sum of what the other workers tell."""
        others = (n for n in range(self._count) if n != self._index)
        return sum(self._words[3 * n + field] for n in others)

    def beat(self) -> None:
        """Tell that this worker's event loop runs."""
        assert self._index is not None
        self.tell(BEATS, self.beats(self._index) + 1)

    def beats(self, index: int) -> int:
        """Return a number that grows while that worker's event loop runs."""
        return int(self._words[3 * index + BEATS])

    def clear(self, index: int) -> None:
        """Forget a worker that has ended: its completions are not under way any more."""
        for field in (IN_FLIGHT, HELD, BEATS):
            self._words[3 * index + field] = 0
