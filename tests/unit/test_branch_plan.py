"""Which outcomes are drafted for, from recorded numbers."""

from __future__ import annotations

import itertools

import pytest

from outrider.drafting.branch_plan import (
    OutcomeRates,
    Outcomes,
    Pace,
    choose_budget,
    plan_branches,
)

# The embedded pair at temperature 1 (benchmarks/draft_ahead.py): acceptance by depth, and where the
# target's token was among the draft's alternatives, under the shared noise.
RATES = OutcomeRates(
    acceptance=(0.75, 0.78, 0.8, 0.8), recovered=(0.63, 0.14, 0.06, 0.03), bonus=(0.8, 0.09, 0.03)
)


def test_chances_are_the_formula() -> None:
    chances = {(a, r): chance for a, r, chance in plan_branches(RATES, 99, 4)}
    assert chances[0, 0] == pytest.approx(0.25 * 0.63)
    assert chances[2, 1] == pytest.approx(0.75 * 0.78 * 0.2 * 0.14)
    assert chances[4, 0] == pytest.approx(0.75 * 0.78 * 0.8 * 0.8 * 0.8)
    assert len(chances) == 4 * 4 + 3
    # What is left is where no alternative that was told apart comes true.
    beyond = 0.25 + 0.75 * 0.22 + 0.75 * 0.78 * 0.2 * (1 + 0.8)
    beyond = beyond * (1 - 0.86) + 0.75 * 0.78 * 0.8 * 0.8 * (1 - 0.92)
    assert sum(chances.values()) == pytest.approx(1 - beyond)


def test_the_budget_goes_to_the_likeliest() -> None:
    plan = plan_branches(RATES, 6, 4)
    assert [(a, r) for a, r, _ in plan] == [(4, 0), (0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]
    every = plan_branches(RATES, 99, 4)
    best = max(
        sum(outcome.chance for outcome in chosen) for chosen in itertools.combinations(every, 3)
    )
    assert sum(outcome.chance for outcome in plan[:3]) == pytest.approx(best)
    assert plan_branches(RATES, 0, 4) == ()


def test_rows_that_go_on_undrafted_move_it_to_the_first_place() -> None:
    late = OutcomeRates(RATES.acceptance, RATES.recovered, RATES.bonus, undrafted=0.9)
    chosen = [(a, r) for a, r, _ in plan_branches(late, 4, 4)]
    assert chosen[:2] == [(0, 0), (0, 1)]
    certain = OutcomeRates(RATES.acceptance, RATES.recovered, RATES.bonus, undrafted=1.0)
    assert {a for a, _, _ in plan_branches(certain, 99, 4)} == {0}


def test_rates_follow_what_came_true() -> None:
    outcomes = Outcomes()
    session, other = outcomes.session(), outcomes.session()
    for _ in range(200):
        # Two accepted, then the second alternative.
        outcomes.observe(session, (1, 2, 3, 4), (5, 6, 7, 8), (1, 2, 6), hit=True)
    rates = outcomes.rates(session, 4, hit=True)
    assert rates.acceptance[0] > 0.95
    assert rates.acceptance[1] > 0.95
    assert rates.acceptance[2] < 0.05
    assert rates.recovered[0] > 0.95
    assert sum(rates.recovered) == pytest.approx(1.0, abs=0.1)
    assert rates.undrafted < 0.05
    fresh = outcomes.rates(other, 4, hit=True)
    assert fresh.acceptance[0] > 0.95, "others begin with what is known"
    for _ in range(200):
        outcomes.observe(other, (1, 2, 3, 4), (), (1,), hit=False)
    assert outcomes.rates(other, 4, hit=False).undrafted > 0.95
    assert outcomes.rates(other, 4, hit=True).undrafted < 0.05
    before = outcomes.rates(other, 4, hit=True).bonus[0]
    for _ in range(50):
        outcomes.observe(other, (1, 2), (7, 8), (1, 2, 7), hit=True)
    assert outcomes.rates(other, 4, hit=True).bonus[0] > before


# Milliseconds of an 8B target and a 1B draft on one H200 (anchors.md), K = 4.
H200 = Pace(step_s=0.0045, network_s=0.0003)


def budget(branches_s: object, pace: Pace = H200, sessions: int = 1) -> int:
    plan = plan_branches(RATES, 8, 4)
    assert callable(branches_s)
    return choose_budget([plan] * sessions, branches_s, 0.0038, pace)


def test_what_the_step_hides_is_free() -> None:
    assert budget(lambda _: 0.0038) == 8
    assert budget(lambda n: 0.0038 + 0.0001 * n) == 7, "a longer round must buy enough hits"


def test_drafting_on_demand_where_ahead_does_not_pay() -> None:
    assert budget(lambda n: 0.02 * n) == 0
    assert budget(lambda n: 0.003 * n) == 1, "slow branches: the likeliest fits"
    assert budget(lambda n: 0.001 * n, sessions=32) == 0


def test_nothing_measured_yet_tries_all() -> None:
    assert budget(lambda _: 0.0, Pace()) == 8
    assert choose_budget([], lambda _: 0.0, 0.0, Pace()) == 0
