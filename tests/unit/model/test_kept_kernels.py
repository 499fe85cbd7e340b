"""outrider/engine/cpu/cache.py: compiled code that processes leave to one another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core.caching import IndexDataCacheFile

from outrider.engine.cpu.cache import keep

SOURCE = """
def total(x):
    found = x.dtype.type(0)
    for each in x:
        found += each
    return found
"""

SINGLE, DOUBLE = np.ones(3, np.float32), np.ones(5, np.float64)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return what makes the kernel anew, as another process would."""
    (tmp_path / "kept_kernel.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()
    monkeypatch.delitem(sys.modules, "kept_kernel", raising=False)
    module = import_module("kept_kernel")

    def anew() -> Any:
        made = njit(module.total)
        keep(made, module.total)
        return made

    return anew


def test_kernel_is_loaded_by_the_next_process(kernel: Callable[[], Any]) -> None:
    assert kernel()(SINGLE) == 3
    after = kernel()
    assert after(SINGLE) == 3
    assert sum(after.stats.cache_hits.values()) == 1


def test_two_processes_that_compile_at_once_leave_nothing_wrong(
    kernel: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first writes its index, the second writes its own; its data come last."""
    index, data = IndexDataCacheFile._save_index, IndexDataCacheFile._save_data
    late: list[tuple[Any, ...]] = []

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(IndexDataCacheFile, "_save_index", index)
        monkeypatch.setattr(IndexDataCacheFile, "_save_data", lambda *rest: late.append(rest))
        assert kernel()(DOUBLE) == 5
        monkeypatch.setattr(IndexDataCacheFile, "_save_data", data)
        index(*arguments)

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", interrupted)
    assert kernel()(SINGLE) == 3
    for arguments in late:
        data(*arguments)
    for made in (kernel(), kernel()):
        assert (made(SINGLE), made(DOUBLE)) == (3, 5)
    assert sum(made.stats.cache_hits.values()) == 2


def test_kernel_on_a_full_disk_runs(
    kernel: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    assert kernel()(SINGLE) == 3
    assert "No space left on device" in caplog.text
    monkeypatch.undo()
    assert kernel()(SINGLE) == 3
