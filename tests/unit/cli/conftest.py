"""A machine without GPUs, whatever the tests run on."""

from __future__ import annotations

import pytest

from outrider.cli import serve_config


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_config, "count_gpus", lambda: 0)
