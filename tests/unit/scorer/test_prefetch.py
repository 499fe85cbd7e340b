"""What a start begins before its imports never fails it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from scorer_service import prefetch


def test_read_ahead_asks_for_every_weight_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).write_text(name)
    asked: list[str] = []

    def advise(file: int, *_: int) -> None:
        asked.append(os.read(file, 99).decode())
        raise OSError("no room")  # a hint, no more

    monkeypatch.setattr(os, "posix_fadvise", advise)
    prefetch._read_ahead(tmp_path)
    prefetch._read_ahead(tmp_path / "missing")
    assert asked == ["a.safetensors", "b.safetensors"]


def test_context_without_driver_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(name: str) -> None:
        asked.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    prefetch._make_context(0)
    assert asked == ["libcuda.so.1"]
