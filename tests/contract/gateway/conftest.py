"""Fixtures of the gateway's contract."""

from __future__ import annotations

import pytest

from gateway.routing import scorers


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a gateway ask its scorers ten times a second, for tests that wait for the next time."""
    monkeypatch.setattr(scorers, "_PROBE_UP_S", 0.1)
    monkeypatch.setattr(scorers, "_PROBE_DOWN_S", 0.05)
