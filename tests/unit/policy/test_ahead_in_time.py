"""Drafting ahead keeps up with a fast scorer: two H200s' times on a simulated clock."""

from __future__ import annotations

import random

import pytest

from outrider.config import EngineConfig
from outrider.params import SamplingParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.types import Request
from tests.support.simulators.simulation import Net, World, draft_model

STEP_S, WAY_S = 0.0049, 0.00115  # of an 8B on an H200
CONFIG = EngineConfig(page_size=4, num_pages=4096, max_model_len=2048, num_speculative_tokens=4)


def run(forward_s: float) -> World:
    world = World(AdaptivePolicy(4), CONFIG, lambda _: STEP_S, random.Random(1))
    world.add(draft_model(0.028, forward_s, max_branches=16), Net(delay_s=WAY_S / 2))
    world.submit(Request(0, (7, 1, 5), SamplingParams(temperature=0.0), StopParams(max_tokens=240)))
    world.run()
    return world


@pytest.mark.parametrize(
    ("forward_s", "k"),
    [
        pytest.param(0.0009, 4, id="all four tokens fit into the step"),
        pytest.param(0.0011, 3, id="a fourth token would come too late"),
    ],
)
def test_branches_are_there_before_the_verdict(forward_s: float, k: int) -> None:
    world = run(forward_s)
    stats = world.last[0].stats
    assert stats is not None
    assert stats.hits >= 0.9 * stats.iter_count
    assert stats.misses_late <= 0.05 * stats.iter_count
    assert abs(stats.drafted / stats.rounds - k) < 0.5
    assert world.now < 1.1 * STEP_S * stats.iter_count, "a round is a verification, and little more"
