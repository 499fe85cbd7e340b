"""Text and JSON files of a model's folder, which may have come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigError

_MAX_BYTES: Final = 500_000_000


def read_text(path: Path) -> str:
    """Read a text file. Raises `ConfigError` for what is none, is too large or is missing."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file.")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ConfigError(f"{path} has {size} bytes, more than {_MAX_BYTES}.")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError`, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; {} if there is no file.

    Raises `ConfigError` if the file cannot be read or holds no object.
    """
    try:
        fields = parse_json(read_text(path))
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return {}
        raise
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    return fields
