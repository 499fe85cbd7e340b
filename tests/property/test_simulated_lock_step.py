"""Drafts made ahead for requests that all run in every step, as in vLLM."""

from __future__ import annotations

import pytest

from outrider.policy.base import DraftMode
from tests.support.simulators.lock_step import LockStep


@pytest.mark.parametrize(("rows", "least"), [(1, 500), (8, 3600), (32, 9000)])
def test_proposer_keeps_pace_with_steps_of_all_rows(
    rows: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a draft for each miss before the branches, half of all rounds missed."""
    world = LockStep(monkeypatch, rows)
    world.rate(3.0)
    rate = world.rate(2.0)
    rounds = sum([stats.rounds for stats in world.stats])
    assert world.policy.mode is DraftMode.AHEAD
    assert sum([stats.misses_late for stats in world.stats]) < 0.1 * rounds
    assert sum([stats.hits for stats in world.stats]) > 0.75 * rounds
    assert rate > least
