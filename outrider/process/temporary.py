"""Folders for temporary files."""

from __future__ import annotations

import tempfile

from outrider.errors import ConfigError


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
