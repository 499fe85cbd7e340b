"""Hidden states through memory beside a Unix socket, and by message where there is none."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.draft_tree import DraftTree
from outrider.rpc.row_ring import RingReader, RingWriter
from tests.support.features import CAPTURED, RowReader
from tests.support.reader_service import serving
from tests.support.scorer import VOCAB, Output, RunningScorer, running_scorer

PROMPT = [i % VOCAB for i in range(40)]


@pytest.fixture(params=[True, False], ids=["data connection", "stream"])
def data_connections(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Where each message's rows went."""
    places: list[int | None] = []
    write = RingWriter.write

    def noted(self: RingWriter, rows: Sequence[bytes | memoryview]) -> int | None:
        places.append(write(self, rows))
        return places[-1]

    monkeypatch.setattr(RingWriter, "write", noted)
    return places


def right(scorer: RunningScorer) -> Callable[[Sequence[int], int], DraftTree]:
    def guess(tokens: Sequence[int], k: int) -> DraftTree:
        return DraftTree.chain(len(tokens), scorer.model.greedy_text(tokens, k))

    return guess


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def sockets(data_connections: bool) -> list[str]:
    return ["scorer.sock", *(["scorer.sock.data"] if data_connections else [])]


@asynccontextmanager
async def attached(
    socket: Path, shared: Path, data_connections: bool
) -> AsyncIterator[tuple[RunningScorer, RowReader]]:
    """A scorer on a Unix socket, and a proposer that dials it there."""
    async with running_scorer(
        features=CAPTURED, unix_path=socket, shared=shared, data_connections=data_connections
    ) as scorer:
        method = RowReader(CAPTURED, right(scorer), vocab_size=VOCAB)
        async with serving(f"unix:{socket}", method):
            await scorer.until(lambda: bool(scorer.hub.roster.proposers), "a proposer is attached")
            yield scorer, method


async def generate(scorer: RunningScorer, method: RowReader, max_tokens: int = 60) -> Output:
    """The rows that were read are the right ones, and drafts came of them."""
    plain = await scorer.generate(PROMPT, max_tokens=max_tokens, enabled=False)
    output = await scorer.generate(PROMPT, max_tokens=max_tokens)
    assert output.token_ids == plain.token_ids
    assert output.aux_info.accepted > 10
    assert (method.wrong, method.rows_seen > len(PROMPT)) == (0, True)
    return output


async def test_rows_go_through_memory_that_has_no_name(
    tmp_path: Path, written: list[int | None], data_connections: bool
) -> None:
    socket = tmp_path / "scorer.sock"
    async with attached(socket, tmp_path, data_connections) as (scorer, method):
        await generate(scorer, method)
        assert written
        assert None not in written
        # Nothing is left, whoever is killed.
        assert names(tmp_path) == sockets(data_connections)


async def test_without_a_common_folder_rows_travel_in_messages(
    tmp_path: Path, written: list[int | None], data_connections: bool
) -> None:
    socket, other = tmp_path / "scorer.sock", tmp_path / "other"
    other.mkdir()
    async with attached(socket, other, data_connections) as (scorer, method):
        await generate(scorer, method)
        assert not written
        assert names(tmp_path) == ["other", *sockets(data_connections)]


async def test_a_proposer_that_never_says_what_it_read_is_sent_rows_in_messages(
    tmp_path: Path,
    written: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
    data_connections: bool,
) -> None:
    make, size = RingReader.__init__, 60 * CAPTURED.row_bytes
    monkeypatch.setattr(RingReader, "__init__", lambda self, folder: make(self, folder, size))
    read = RingReader.read

    def silently(self: RingReader, position: int, sizes: Sequence[int]) -> list[bytes]:
        rows = read(self, position, sizes)
        os.pwrite(self._file, bytes(8), 32)
        return rows

    monkeypatch.setattr(RingReader, "read", silently)
    async with attached(tmp_path / "scorer.sock", tmp_path, data_connections) as (scorer, method):
        await generate(scorer, method)
        assert written[0] == 0
        assert written[-1] is None


async def test_a_file_that_is_shortened_costs_a_stream_and_no_request(
    tmp_path: Path,
    written: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
    data_connections: bool,
) -> None:
    read = RingReader.read
    shortened: list[RingReader] = []

    def short(self: RingReader, position: int, sizes: Sequence[int]) -> list[bytes]:
        if not shortened:
            shortened.append(self)
            os.ftruncate(self._file, 0)
        return read(self, position, sizes)

    monkeypatch.setattr(RingReader, "read", short)
    async with attached(tmp_path / "scorer.sock", tmp_path, data_connections) as (scorer, method):
        plain = await scorer.generate(PROMPT, enabled=False)
        assert (await scorer.generate(PROMPT)).token_ids == plain.token_ids
        await scorer.until(lambda: bool(scorer.hub.roster.proposers), "it has dialled anew")
        await generate(scorer, method)
        assert len(shortened) == 1
        assert None not in written[1:]
