"""Files of a model's folder that no text editor wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.models.files import read_json
from outrider.models.tokenizer import Tokenizer
from outrider.models.weight_files import read_headers


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(600_000_000)  # a hole, which takes no space


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (os.mkfifo, "is no file"),  # to open one would wait for ever
        (Path.mkdir, "is no file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no file"),
        (_large, "has 600000000 bytes, more than"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda path: path.write_text("[" * 100_000), "nested too deeply"),
    ],
)
def test_file_that_cannot_be_read_whole_is_refused(
    write: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    write(path)
    with pytest.raises(ConfigError, match=said):
        read_json(path)
    with pytest.raises(ConfigError, match=said):
        Tokenizer.load(tmp_path)


def test_file_that_is_missing_is_an_empty_object(tmp_path: Path) -> None:
    (tmp_path / "dangling.json").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("missing.json", "dangling.json", "file/config.json"):
        assert read_json(tmp_path / name) == {}


def test_weights_that_are_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="is no file"):
        read_headers(tmp_path, ["model.safetensors"])
