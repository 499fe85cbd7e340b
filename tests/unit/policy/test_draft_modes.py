"""Ahead, on demand, or no drafts: the fastest mode is found, and left when it is not any more."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from outrider.engine.policy.draft_mode import DraftMode
from outrider.engine.policy.mode_selector import MODES
from outrider.engine.policy.mode_trials import INTERVAL, MOST_LOST, TRIAL_STEPS, ModeTrials
from tests.support.simulators.two_devices import TwoDevices

OFF, ON_DEMAND, AHEAD = MODES
STEP_S = {OFF: 0.010, ON_DEMAND: 0.025, AHEAD: 0.020}  # of 1 and 3 tokens


def play(
    trials: ModeTrials, steps: int, step_s: Mapping[DraftMode, float] = STEP_S
) -> dict[DraftMode, int]:
    """So many steps; how many in each mode."""
    taken = dict.fromkeys(MODES, 0)
    for _ in range(steps):
        mode = trials.mode
        taken[mode] += 1
        trials.observe(3 if mode.drafts else 1, step_s[mode], drafted=float(mode.drafts))
    return taken


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("best", MODES)
def test_trials_from_any_mode_find_the_fastest(first: DraftMode, best: DraftMode) -> None:
    step_s = {OFF: 0.010, ON_DEMAND: 0.034, AHEAD: 0.034}
    step_s[best] *= 0.75
    trials = ModeTrials(TRIAL_STEPS, modes=MODES, incumbent=first)
    play(trials, 16 * INTERVAL, step_s)
    assert trials.incumbent is best
    assert play(trials, 10_000, step_s)[best] > 0.95 * 10_000


def test_trials_of_two_other_modes_lose_little() -> None:
    trials = ModeTrials(modes=MODES, incumbent=AHEAD)
    play(trials, 20 * INTERVAL)
    steps = 50_000
    taken = play(trials, steps)
    tokens = sum([n * (3 if mode.drafts else 1) for mode, n in taken.items()])
    lost_s = sum([n * STEP_S[mode] for mode, n in taken.items()]) - tokens * STEP_S[AHEAD] / 3
    assert taken[OFF] > 0
    assert taken[ON_DEMAND] > 0
    assert lost_s < 1.2 * MOST_LOST * steps * STEP_S[AHEAD]


def test_trials_of_equal_modes_do_not_alternate() -> None:
    trials, changes, incumbent = ModeTrials(modes=MODES, incumbent=AHEAD), 0, AHEAD
    for i in range(20_000):
        luck = 1.0 + 0.02 * (-1) ** (i // 40)
        play(trials, 1, {**STEP_S, ON_DEMAND: 0.0202 * luck, AHEAD: 0.020 / luck})
        changes += trials.incumbent is not incumbent
        incumbent = trials.incumbent
    assert changes <= 2


def rate_without(rows: int) -> float:
    world = TwoDevices(rows, 0.0, speculate=False)
    world.rate(1.0)
    return world.rate(2.0)


def test_many_rows_draft_on_demand_and_few_ahead() -> None:
    """Branches for 64 rows come too late for half of them, and delay the drafts of the others."""
    world = TwoDevices(64, 0.0)
    world.rate(3.5)
    rate = world.rate(4.0)
    assert world.steps_on_demand > 0.5 * world.steps
    assert rate > 1.12 * rate_without(64)
    world.set_rows(2)  # 8 would be as fast on demand, within 5 %
    world.rate(2.0)
    rate = world.rate(4.0)
    assert world.steps_on_demand < 0.3 * world.steps, "the load has fallen"
    assert rate > 2.2 * rate_without(2)


def test_greedy_requests_after_sampled_ones_are_drafted_for_within_seconds() -> None:
    world = TwoDevices(32, 1.0)
    world.rate(4.0)
    world.temperature = 0.0
    world.rate(2.5)
    assert world.rate(2.0) > 1.12 * rate_without(32)


def test_a_single_request_drafts_ahead() -> None:
    world = TwoDevices(1, 0.0)
    rate = world.rate(6.0)
    assert world.steps_on_demand < 0.03 * world.steps
    assert rate > 2.8 * rate_without(1)


def test_drafts_that_pay_in_no_mode_are_not_made() -> None:
    world = TwoDevices(32, 1.0)
    world.rate(2.0)
    assert world.rate(6.0) > 0.97 * rate_without(32)
