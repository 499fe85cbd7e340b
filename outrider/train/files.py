"""Files that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import ConfigError


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path`; a crash while writing leaves none, or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    yield part
    part.replace(path)


def check_folder(folder: Path) -> None:
    """Raises `ConfigError` if no file can be written there; makes nothing yet."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written: {error.strerror}.") from error
