"""Read the token ids that end a text, by one rule for every service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.models.files import read_json


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the ids that end a text, as `generate` of transformers takes them from a folder.

    generation_config.json alone decides if it is there, else config.json. What neither file says
    is not made up, so a model may have no id that ends a text. Raises `ConfigError`.
    """
    name = "generation_config.json"
    if (folder / name).is_file():
        return _ids(folder / name, read_json(folder / name).get("eos_token_id"))
    fields = read_json(folder / "config.json")
    text = fields.get("text_config")
    if fields.get("eos_token_id") is None and isinstance(text, dict):
        fields = text
    return _ids(folder / "config.json", fields.get("eos_token_id"))


def _ids(path: Path, value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"{path} has an eos_token_id that is no token id: {value!r}.")
    return frozenset(ids)
