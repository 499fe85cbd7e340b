"""Folders for temporary files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError

_PREFIX: Final = "outrider-run-"


def temporary_folder() -> str:
    """Return where temporary files go; torch cannot even be imported where there is none.

    Raises `ConfigError` if no file can be written in any of the places that `tempfile` tries.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            "no temporary file can be written, in $TMPDIR, /tmp, /var/tmp, /usr/tmp or the working "
            "folder: let TMPDIR name a folder with room that this user may write to."
        ) from error


@contextlib.contextmanager
def run_folder(parent: str) -> Iterator[str]:
    """Yield a new folder, locked while this process lives; first delete those of ended processes.

    A process that is killed deletes nothing, but its lock goes with it. Raises `OSError`.
    """
    for left in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _opened(left) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    # Nobody else deletes it before it is locked, since it gets its name only then.
    folder = tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent)
    try:
        with _opened(folder) as lock:
            with contextlib.suppress(OSError):  # not locked, as on NFS, it keeps a name to be left
                fcntl.flock(lock, fcntl.LOCK_EX)
                named = f"{parent}/{Path(folder).name.removeprefix('.')}"
                os.rename(folder, named)
                folder = named
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder: str | Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
