"""Which outcomes are drafted for, from recorded numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.drafting.ahead.budget import Budget, Plans, choose_budget, plan_branches
from outrider.drafting.ahead.outcomes import Outcomes
from outrider.drafting.drafters import Forks
from outrider.drafting.proposer import Pace

# The embedded pair at temperature 1, shared noise gives: acceptance .54, the
# rest by rank. Four tokens are verified, and what may follow them is known.
PLACE = (0.54, 0.15, 0.07, 0.033, 0.033, 0.015, 0.015, 0.015)
CHANCES = np.array([PLACE] * 5)
K = 4

Chances = NDArray[np.float64]
Outcome = tuple[int, int, float]  # accepted, rank, chance


def plan_all(sessions: list[tuple[Chances, int, float]], budget: int) -> Plans:
    """Of sessions' chances, tokens that are verified, and shares of undrafted rounds."""
    chances, verified, undrafted = zip(*sessions, strict=True)
    sizes = np.array([len(each) for each in chances])
    return plan_branches(
        np.concatenate(chances), sizes, np.array(verified), budget, np.array(undrafted)
    )


def listed(plans: Plans, num_ranks: int) -> list[list[Outcome]]:
    return [
        [(*divmod(outcome, num_ranks), chance) for outcome, chance in plan if chance > 0.0]
        for plan in (
            zip(outcomes, chances, strict=True)
            for outcomes, chances in zip(
                plans.outcomes.tolist(), plans.chances.tolist(), strict=True
            )
        )
    ]


def plan_one(chances: Chances, verified: int, budget: int, undrafted: float = 0.0) -> list[Outcome]:
    return listed(plan_all([(chances, verified, undrafted)], budget), chances.shape[1])[0]


def test_plan_branches_of_any_session_equals_the_formula() -> None:
    chances = {(a, r): chance for a, r, chance in plan_one(CHANCES, K, 99)}
    assert chances[0, 1] == pytest.approx(0.15)
    assert chances[2, 2] == pytest.approx(0.54**2 * 0.07)
    assert chances[4, 0] == pytest.approx(0.54**5)
    assert len(chances) == 4 * 7 + 8
    beyond = (1 - sum(PLACE)) * (1 + 0.54 + 0.54**2 + 0.54**3 + 0.54**4)
    assert sum(chances.values()) == pytest.approx(1 - beyond)


def test_plan_branches_with_any_budget_takes_the_likeliest() -> None:
    plan = plan_one(CHANCES, K, 5)
    assert [(a, r) for a, r, _ in plan] == [(0, 1), (1, 1), (0, 2), (4, 0), (2, 1)]
    every = plan_one(CHANCES, K, 99)
    best = max(sum(p for _, _, p in chosen) for chosen in itertools.combinations(every, 3))
    assert sum(p for _, _, p in plan[:3]) == pytest.approx(best)
    assert plan_one(CHANCES, K, 0) == []


def test_plan_branches_of_several_sessions_equals_each_alone() -> None:
    rng = np.random.default_rng(7)
    for _ in range(50):
        sessions = []
        for _ in range(rng.integers(1, 6)):
            chances = rng.dirichlet(np.ones(9), rng.integers(1, 7))[:, :8].copy()
            chances[rng.random(chances.shape) < 0.1] = 0.0
            sessions.append((chances, int(rng.integers(1, 6)), float(rng.random())))
        together = listed(plan_all(sessions, 5), 8)
        assert together == [plan_one(chances, v, 5, u) for chances, v, u in sessions]


def test_plans_best_of_several_sessions_orders_them_by_chance() -> None:
    chances = np.array([[0.5, 0.4, 0.1, 0.0], [0.3, 0.2, 0.2, 0.0], [0.5, 0.4, 0.0, 0.0]])
    outcomes = np.array([[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 0, 0]])
    sessions, best = Plans(chances, outcomes).best(3)
    assert sessions.tolist() == [0, 2, 0, 2, 1, 1, 1, 0], "of equals the first session's"
    assert best.tolist() == [1, 7, 2, 8, 4, 5, 6, 3]
    assert Plans(chances, outcomes).best(1)[1].tolist() == [1, 7, 4]


@pytest.mark.parametrize("known", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("verified", [1, 2, 4])
def test_plan_branches_with_known_draft_includes_its_continuation(
    known: int, verified: int
) -> None:
    """From its end, which may be what is verified, what follows that, or beyond."""
    verified = min(verified, known)
    chances = {(a, r): p for a, r, p in plan_one(CHANCES[[0] * known], verified, 99)}
    assert chances.pop((known - 1, 0)) == pytest.approx(0.54 ** min(verified + 1, known))
    assert all(r > 0 for _, r in chances)
    assert {a for a, _ in chances} == set(range(min(verified + 1, known)))


def test_plan_branches_at_a_certain_place_adds_no_branch() -> None:
    chances = CHANCES.copy()
    chances[1] = (0.999, 0.001, 0, 0, 0, 0, 0, 0)
    assert 1 not in {a for a, _, _ in plan_one(chances, K, 8)}


def test_plan_branches_when_undrafted_prefers_first_place() -> None:
    assert [a for a, _, _ in plan_one(CHANCES, K, 3, undrafted=0.9)] == [0, 0, 0]
    assert {a for a, _, _ in plan_one(CHANCES, K, 99, undrafted=1.0)} == {0}


GAPS = np.array([[0, 0.05, 1.2, 4], [0, 7, 9, np.inf], [0, 0.6, 1.2, 4]], np.float32)


def test_outcomes_before_measurement_follow_gaps() -> None:
    chances = Outcomes().chances(GAPS)
    assert chances[1, 0] > 0.95 > chances[2, 0] > chances[0, 0]
    assert chances[0, 1] > 3 * chances[0, 3]
    assert chances[1, 3] == 0.0, "what was cut cannot come"
    assert (chances.sum(axis=1) <= 1.0 + 1e-9).all()
    assert (np.diff(chances, axis=1) <= 0).all()


def test_outcomes_after_rounds_follow_truth() -> None:
    outcomes = Outcomes()
    candidates = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], np.int32)
    for i in range(400):
        # The first place is always right, the second one in half of the cases.
        truth = (1, 5, 99) if i % 2 else (1, 6, 99)
        outcomes.observe(Forks(candidates[:2], GAPS[[1, 2]]), truth[:2], hit=True)
    outcomes.count()
    chances = outcomes.chances(GAPS)
    assert chances[1, 0] > 0.98
    assert chances[2, :2] == pytest.approx([0.5, 0.5], abs=0.03)
    other = np.array([[0, 2.2, 2.8, 5.5]], np.float32)
    assert outcomes.chances(other) == pytest.approx(Outcomes().chances(other)), "other cases"


def test_outcomes_when_never_counted_keep_last_rounds() -> None:
    rng = np.random.default_rng(0)
    long, short = Outcomes(), Outcomes()
    for i in range(5000):
        drafted = Forks(rng.integers(0, 3, (4, 3), np.int32), rng.random((4, 3), np.float32))
        truth = tuple(rng.integers(0, 3, 2).tolist())
        for outcomes in (long, short) if i >= 5000 - 1024 else (long,):
            outcomes.observe(drafted, truth, hit=True)
    long.count()
    short.count()
    assert (long.chances(GAPS) == short.chances(GAPS)).all()


def test_outcomes_with_single_token_count_undrafted_round() -> None:
    outcomes = Outcomes()
    candidates = np.array([[1, 2], [5, 6], [9, 10]], np.int32)
    forks = Forks(candidates, np.array([[0, 1]] * 3, np.float32))
    for _ in range(200):
        outcomes.observe(forks, (1,), hit=False)
        outcomes.observe(forks, (2,), hit=True)  # might have been rejected
        outcomes.count()
    assert outcomes.undrafted(hit=False) > 0.95
    assert outcomes.undrafted(hit=True) == pytest.approx(0.1)


def test_outcomes_when_counted_twice_count_a_round_once() -> None:
    outcomes, again = Outcomes(), Outcomes()
    candidates = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    for each in (outcomes, again):
        for truth in ((1, 5, 9), (1,), (2,)):
            each.observe(Forks(candidates, GAPS[:2]), truth, hit=True)
    outcomes.count()
    for _ in range(3):
        again.count()
        chances, undrafted = again.chances(GAPS), again.undrafted(hit=True)
    assert (chances == outcomes.chances(GAPS)).all()
    assert undrafted == outcomes.undrafted(hit=True)


@pytest.mark.parametrize("every", [2, 4])
def test_outcomes_undrafted_after_rounds_is_the_measured_share(every: int) -> None:
    outcomes = Outcomes()
    candidates = np.array([[1, 2], [5, 6]], np.int32)
    for i in range(400):
        truth = (1,) if i % every == 0 else (1, 5)
        outcomes.observe(Forks(candidates, GAPS[:2, :2]), truth, hit=True)
        outcomes.count()
    assert outcomes.undrafted(hit=True) == pytest.approx(1 / every, abs=0.03)


def test_outcomes_acceptance_after_rounds_is_that_of_best_candidates() -> None:
    outcomes = Outcomes()
    forks = Forks(np.array([[1, 2]]), GAPS[:1, :2])
    for i in range(400):
        outcomes.observe(forks, (1 if i % 4 else 2,), hit=True)
    outcomes.count()
    assert outcomes.acceptance == pytest.approx(0.75, abs=0.05)
    for _ in range(200):  # sampled texts after greedy ones
        outcomes.observe(forks, (2,), hit=True)
    outcomes.count()
    assert outcomes.acceptance < 0.1


# Seconds of an 8B target and a 1B draft on an H200 each, K = 4.
H200 = Pace(step_s=0.0049, network_s=0.0012)


def budget(
    forward_s: Callable[[int], float],
    pace: Pace = H200,
    *,
    sessions: int = 1,
    acceptance: float = 0.86,
    joined: bool = False,
) -> Budget:
    place = (acceptance, 0.7 * (1 - acceptance), 0.2 * (1 - acceptance), 0.05 * (1 - acceptance))
    plans = plan_all([(np.array([place] * 5), K, 0.0)] * sessions, 16)
    return choose_budget(
        plans,
        lambda rows: np.array([forward_s(int(n)) for n in rows]),
        K * forward_s(1),
        pace,
        wanted=K,
        acceptance=acceptance,
        joined=joined,
    )


def test_choose_budget_with_long_step_fills_it() -> None:
    assert budget(lambda _: 0.0009).tokens == 4
    assert budget(lambda _: 0.00114).tokens == 3, "a fourth token would be late"
    assert budget(lambda _: 0.0018).tokens == 2


def test_choose_budget_at_low_acceptance_drafts_short() -> None:
    assert budget(lambda _: 0.0003, acceptance=0.1).tokens == 1


def test_choose_budget_with_short_step_keeps_tokens() -> None:
    assert budget(lambda _: 0.0006, Pace(step_s=0.0045, network_s=0.005)).tokens >= 3


def test_choose_budget_with_costly_rows_wants_hits() -> None:
    free, dear = budget(lambda _: 0.0009), budget(lambda n: 0.0008 + 0.0001 * n)
    assert free.branches > dear.branches > 0


def test_choose_budget_when_ahead_does_not_pay_is_on_demand() -> None:
    on_demand = Budget(0, K)
    assert budget(lambda n: 0.02 * n) == on_demand
    assert budget(lambda n: 0.001 * n, sessions=32) == on_demand


def test_choose_budget_joined_with_drafts_shortens_both() -> None:
    def forward_s(rows: int) -> float:
        return 0.0006 + 0.00002 * (rows + 8)

    joined = budget(forward_s, sessions=24, joined=True)
    assert joined.branches > 0
    assert joined.tokens < K
    assert budget(forward_s, Pace(0.02), sessions=24, joined=True).tokens == K


def test_choose_budget_late_in_a_round_drafts_less() -> None:
    late = Pace(H200.step_s, H200.network_s, spent_s=0.002)
    assert budget(lambda _: 0.0009, late).tokens < budget(lambda _: 0.0009).tokens


def test_choose_budget_with_a_slow_host_drafts_less() -> None:
    slow = Pace(H200.step_s, H200.network_s, host_s=0.002)
    assert budget(lambda _: 0.0009, slow).tokens < budget(lambda _: 0.0009).tokens


def test_choose_budget_before_measurement_tries_all() -> None:
    assert budget(lambda _: 0.0, Pace()) == Budget(16, K)
