"""Memory that a scorer and a proposer share: what is read was written, and trust goes one way."""

from __future__ import annotations

import errno
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import UnavailableError
from outrider.rpc.row_ring import RING_BYTES, RingReader, RingWriter, open_ring
from outrider.v1 import draft_pb2

SIZE = 64


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[RingReader, RingWriter]]:
    reader = RingReader(tmp_path, SIZE)
    writer = open_ring(tmp_path, reader.offer)
    assert writer is not None
    reader.unlink()
    yield reader, writer
    reader.close()
    writer.close()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(0, 3)),
        max_size=40,
    )
)
def test_what_is_read_was_written_however_late(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[list[int], int]]
) -> None:
    """Messages of parts of some sizes; after each the proposer reads some of those that came."""
    folder = tmp_path_factory.mktemp("ring")
    reader = RingReader(folder, SIZE)
    writer = open_ring(folder, reader.offer)
    assert writer is not None
    unread: deque[tuple[int, list[bytes]]] = deque()
    source = random.Random(0)
    for sizes, num_read in plan:
        rows = [source.randbytes(size) for size in sizes]
        at = writer.write(rows)
        if not unread:
            assert (at is not None) == (sum(sizes) <= SIZE)
        if at is not None:
            unread.append((at, rows))
        for _ in range(min(num_read, len(unread))):
            position, wanted = unread.popleft()
            assert reader.read(position, [*map(len, wanted)]) == wanted
    for position, wanted in unread:
        assert reader.read(position, [*map(len, wanted)]) == wanted
    reader.close()
    writer.close()


def test_a_proposer_that_keeps_up_makes_the_file_no_larger(
    tmp_path: Path, ends: tuple[RingReader, RingWriter]
) -> None:
    reader, writer = ends
    for _ in range(20):
        at = writer.write([b"x" * 10])
        assert at is not None
        reader.read(at, [10])
    assert os.fstat(reader._file).st_size == 4096 + 10
    assert not [*tmp_path.iterdir()]


def test_rows_without_room_are_not_written(ends: tuple[RingReader, RingWriter]) -> None:
    reader, writer = ends
    assert writer.write([bytes(SIZE + 1)]) is None
    first, second = writer.write([b"a" * 40]), writer.write([b"b" * 24])
    assert (first, second) == (0, 40)
    assert writer.write([b"c"]) is None
    assert reader.read(0, [40]) == [b"a" * 40]
    assert writer.write([b"c" * 40]) == SIZE
    assert reader.read(40, [24]) == [b"b" * 24]


@pytest.mark.parametrize("position", [2**63, 41, SIZE + 1])
def test_a_proposer_that_says_it_has_read_more_is_not_believed(
    ends: tuple[RingReader, RingWriter], position: int
) -> None:
    reader, writer = ends
    assert writer.write([bytes(40)]) == 0
    os.pwrite(reader._file, position.to_bytes(8, "little"), 32)
    assert writer.write([bytes(40)]) is None


def test_a_file_that_its_proposer_shortens_kills_nobody(
    ends: tuple[RingReader, RingWriter],
) -> None:
    reader, writer = ends
    assert writer.write([bytes(40)]) == 0
    os.ftruncate(reader._file, 0)
    assert writer.write([bytes(10)]) is None
    with pytest.raises(UnavailableError):
        reader.read(0, [40])
    assert writer.write([bytes(10)]) is None


def test_without_memory_rows_travel_in_messages(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[RingReader, RingWriter]
) -> None:
    _, writer = ends

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert writer.write([b"x"]) is None
    assert writer.write([b"x"]) is None


def test_a_scorer_opens_only_what_was_made_for_it(tmp_path: Path) -> None:
    reader = RingReader(tmp_path)
    offer = reader.offer
    name, key = offer.name, offer.key
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert open_ring(elsewhere, offer) is None
    for wrong in (
        draft_pb2.RowRing(name=name, key=bytes(32), size=SIZE),
        draft_pb2.RowRing(name=name, key=b"", size=SIZE),
        draft_pb2.RowRing(name=f"../{tmp_path.name}/{name}", key=key, size=SIZE),
        draft_pb2.RowRing(name=name, key=key, size=0),
        draft_pb2.RowRing(name=name, key=key, size=RING_BYTES + 1),
    ):
        assert open_ring(tmp_path, wrong) is None
    link, pipe, folder = (f"outrider-{digit * 16}.rows" for digit in "123")
    (tmp_path / link).symlink_to(tmp_path / name)
    os.mkfifo(tmp_path / pipe)
    (tmp_path / folder).mkdir()
    for other in (link, pipe, folder):
        assert open_ring(tmp_path, draft_pb2.RowRing(name=other, key=key, size=SIZE)) is None
    writer = open_ring(tmp_path, offer)
    assert writer is not None
    writer.close()
    reader.close()
    assert not (tmp_path / name).exists()


def test_what_a_killed_proposer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left, fresh, other = (tmp_path / f"outrider-{name}.rows" for name in ("0" * 16, "1" * 16, "x"))
    long_ago = time.time() - 3600
    for path in (left, fresh, other):
        path.touch()
    for path in (left, other):
        os.utime(path, (long_ago, long_ago))
    RingReader(tmp_path).close()
    assert sorted(tmp_path.iterdir()) == [fresh, other]
