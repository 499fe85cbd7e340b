"""Files that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from outrider.errors import ConfigError


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path`; a crash while writing leaves none, or the old one.

    Raises `ConfigError` where it cannot be written, and leaves no part of it on a full disk.
    """
    part = path.with_suffix(".part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `ConfigError` where `path`, or what is in that folder, cannot be written."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's own is a RuntimeError
        cause: BaseException = error
        while not isinstance(cause, OSError) and cause.__context__ is not None:
            cause = cause.__context__
        reason = (isinstance(cause, OSError) and cause.strerror) or cause
        raise ConfigError(f"{path} cannot be written: {reason}.") from error


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if no file can be written there; makes nothing yet."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written: {error.strerror}.") from error
