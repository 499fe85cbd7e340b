"""The line that ends a start."""

from __future__ import annotations

import pytest

from outrider import start_times


def test_summary_counts_inner_phases_once_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(start_times.time, "perf_counter", lambda: now)
    monkeypatch.setattr(start_times, "_counted", 0.0)
    start_times.summary()
    with start_times.phase("weights"):
        now = 1.0
        with start_times.phase("tilings"):
            now = 3.0
        now = 3.5
    now = 3.75
    assert start_times.summary() == "3.8 s: weights 1.5, tilings 2.0, other 0.2"
    assert start_times.summary() == "0.0 s: other 0.0"
