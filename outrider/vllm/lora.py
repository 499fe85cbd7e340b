"""Adapters that vLLM's `--lora-modules` names. Imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from outrider.errors import ConfigError


class Adapter(NamedTuple):
    """An adapter of the served model, and where it lies."""

    name: str
    path: str


def read_adapters(words: Sequence[str], *, enabled: bool) -> tuple[Adapter, ...]:
    """Read NAME=PATH, or vLLM's JSON object of the same. Raises `ConfigError`.

    `enabled`: vLLM was told `--enable-lora`.
    """
    adapters = tuple(_adapter(word) for word in words)
    if adapters and not enabled:
        raise ConfigError("--lora-modules needs --enable-lora behind --, too.")
    names = [adapter.name for adapter in adapters]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--lora-modules names {sorted(twice)[0]!r} twice.")
    return adapters


def _adapter(word: str) -> Adapter:
    name, _, path = word.partition("=")
    if word.lstrip().startswith("{"):
        try:
            fields = json.loads(word)
        except ValueError:
            fields = {}
        name, path = str(fields.get("name") or ""), str(fields.get("path") or "")
    if not name.strip() or not path.strip():
        raise ConfigError(f"--lora-modules {word}: give NAME=PATH, a name and an adapter's folder.")
    return Adapter(name, path)
