"""Fixtures of tests on a device."""

from __future__ import annotations

import traceback

import pytest


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are compiled, or read from Triton's cache, from now on."""
    triton = pytest.importorskip("triton")
    found: list[str] = []

    def note(**kernel: object) -> None:
        here = [f"{each.name}:{each.lineno}" for each in traceback.extract_stack()[-16:]]
        found.append(f"{kernel['repr']} by {' '.join(here)}")

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return found
