"""Temporary folders: where none can be made, and what killed processes leave."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import gateway.__main__
import proposer_service.__main__
import scorer_service.__main__
from outrider.cli import command_line, serve
from outrider.offline import batch
from outrider.process.temporary import run_folder

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


def _hold(parent: Path) -> subprocess.Popen[str]:
    """Start a process that has a folder with a file in it, and wait until it has."""
    code = (
        "import pathlib, sys, time\n"
        "from outrider.process.temporary import run_folder\n"
        "with run_folder(sys.argv[1]) as folder:\n"
        "    pathlib.Path(folder, 'file').touch()\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(600)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(parent)], stdout=subprocess.PIPE, text=True
    )


def test_run_folder_of_a_killed_process_is_deleted_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    other = tmp_path / "outrider-other"
    other.mkdir()
    with _hold(tmp_path) as living, _hold(tmp_path) as killed:
        try:
            folders = [Path(each.stdout.readline().strip()) for each in (living, killed)]  # type: ignore[union-attr]
            killed.kill()
            killed.wait()
            assert all((folder / "file").exists() for folder in folders)
            with run_folder(str(tmp_path)) as mine:
                assert set(tmp_path.iterdir()) == {folders[0], Path(mine), other}
            assert set(tmp_path.iterdir()) == {folders[0], other}
            assert (folders[0] / "file").exists()
        finally:
            living.kill()
            killed.kill()


def test_run_folder_that_cannot_be_locked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, or where the system has no lock left."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        held = run_folder(str(tmp_path))
        folder = Path(held.__enter__())
    with run_folder(str(tmp_path)) as other:
        assert set(tmp_path.iterdir()) == {folder, Path(other)}
    held.__exit__(None, None, None)
    assert not list(tmp_path.iterdir())
