"""Commands on a machine where no temporary file can be written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import gateway.__main__
import proposer_service.__main__
import scorer_service.__main__
from outrider.cli import command_line, serve
from outrider.offline import batch

_EMBEDDED = ["--model", "embedded"]


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (command_line.main, ["serve", "embedded", "--port=0", "--grpc-port=0"]),
        (command_line.main, ["serve", "embedded", "--dry-run"]),
        (batch.main, [*_EMBEDDED, "-i", __file__, "-o", "answers"]),
        (scorer_service.__main__.main, [*_EMBEDDED, "--port=0"]),
        (proposer_service.__main__.main, ["--scorer=x:1", "--model=embedded"]),
        (gateway.__main__.main, [*_EMBEDDED, "--scorer=x:1", "--workers=2", "--http-port=0"]),
    ],
)
def test_command_without_a_place_for_temporary_files_is_refused_in_one_line(
    main: Callable[[Sequence[str]], int],
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    monkeypatch.setattr(serve, "memory_folder", lambda: None)
    assert main(argv) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no temporary file can be written" in last
    assert not list(tmp_path.iterdir())
