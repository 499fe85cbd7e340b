"""What a way brings, with and without newcomers, and by what two ways are compared."""

from __future__ import annotations

import math

import pytest
from outrider.engine.policy.mode import TRIAL_STEPS, DraftMode
from outrider.engine.policy.throughput import FEW, Throughput

from outrider.engine.policy.mode_trials import ModeTrials

WINDOW = 64
CALM_S, BUSY_S = 0.010, 0.030


def rate_of(uncontended: int, busy: int, *, slower: float = 1.0, drafts: bool = True) -> Throughput:
    """After so many steps of two tokens of each kind."""
    rate = Throughput(WINDOW, drafts=drafts)
    for newcomers, steps in ((False, uncontended), (True, busy)):
        for _ in range(steps):
            rate.add(2.0, slower * (BUSY_S if newcomers else CALM_S), 1.0, newcomers=newcomers)
    return rate


@pytest.mark.parametrize(("uncontended", "busy"), [(8, 40), (40, 8), (24, 24)])
def test_a_way_that_met_more_newcomers_is_not_worse(uncontended: int, busy: int) -> None:
    for share in (0.0, 0.2, 0.7):
        assert rate_of(uncontended, busy).over(rate_of(32, 16), share) == pytest.approx(1.0)
        assert rate_of(uncontended, busy, slower=1.25).over(
            rate_of(32, 16), share
        ) == pytest.approx(0.8)


def test_where_one_way_met_none_only_steps_without_newcomers_are_compared() -> None:
    assert rate_of(32, 0).over(rate_of(32, 16), 0.5) == pytest.approx(1.0)
    assert rate_of(32, FEW - 1).over(rate_of(32, 16), 0.5) == pytest.approx(1.0), "few say nothing"
    assert rate_of(0, 16).over(rate_of(32, 16), 0.0) == pytest.approx(1.0)


def test_what_newcomers_cost_drafts_counts_against_none() -> None:
    """Without drafts nothing is lost to newcomers once their prompts are taken off."""
    none = rate_of(32, 0, slower=1.5, drafts=False)
    drafts = rate_of(32, 16)
    assert drafts.over(none, 0.0) == pytest.approx(1.5)
    assert drafts.over(none, 0.5) == pytest.approx(0.75)
    assert none.over(drafts, 0.5) == pytest.approx(1 / 0.75)


def test_old_steps_fade_by_kind() -> None:
    rate = rate_of(WINDOW, 16)
    for _ in range(6 * WINDOW):
        rate.add(2.0, 2 * CALM_S, 1.0, newcomers=False)
    assert rate.seconds_for(2.0, 0.0) == pytest.approx(2 * CALM_S, rel=0.01)
    assert rate.seconds_for(2.0, 1.0) == pytest.approx(BUSY_S)


def test_what_is_unknown_is_neither_better_nor_a_division_by_zero() -> None:
    unknown, known = Throughput(WINDOW, drafts=True), rate_of(8, 0)
    assert unknown.over(known, 0.5) == 0.0
    assert known.over(unknown, 0.5) == math.inf
    assert unknown.over(unknown, 0.5) == 0.0
    assert unknown.seconds_for(1.0, 0.5) == 0.0


@pytest.mark.parametrize(("on_demand_s", "wins"), [(0.0165, True), (0.0200, False)])
def test_a_trial_that_meets_a_wave_of_newcomers_is_not_lost_for_that(
    on_demand_s: float, wins: bool
) -> None:
    """Rows ahead take 20 ms a step, or 17 on demand: 32 newcomers make ten steps twice as long."""
    ways = (DraftMode.ON_DEMAND, DraftMode.AHEAD)
    contest = ModeTrials(TRIAL_STEPS, ways=ways, incumbent=DraftMode.AHEAD)
    waves = 0
    while contest.way is DraftMode.AHEAD and waves < 20:
        for i in range(64):
            contest.observe(3, 0.020 * (2 if i < 10 else 1), drafted=1.0, prompts=i < 10)
            if contest.way is not DraftMode.AHEAD:
                break
        waves += 1
    assert contest.way is DraftMode.ON_DEMAND, "it is tried"
    for i in range(640):
        if contest.way is not DraftMode.ON_DEMAND:
            break
        busy = i % 64 < 30  # three times as many as usual
        contest.observe(3, on_demand_s * (2 if busy else 1), drafted=1.0, prompts=busy)
    assert (contest.incumbent is DraftMode.ON_DEMAND) is wins
