"""JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`; {} if there is no file.

    Raises `ConfigError` if the file cannot be read or holds no object.
    """
    if not path.exists():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    return fields
