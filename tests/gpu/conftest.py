"""Fixtures of tests on a device."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
# FlashAttention imports, and passes, what its compiler deprecates, more with each version.
_THEIRS = ("ignore::DeprecationWarning", "ignore:Argument aux_data:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what kernel compilers warn of fail no test; tests on a CPU heed our own warnings."""
    for item in items:
        if _FOLDER in item.path.parents:
            for each in _THEIRS:
                item.add_marker(pytest.mark.filterwarnings(each))


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
