"""K by expected goodput equals its formulas, written down plainly."""

from __future__ import annotations

import random

import pytest
from outrider.engine.policy.goodput import NEARLY, Goodput

from outrider.engine.policy.acceptance import Acceptance, accepted
from outrider.engine.policy.cost_model import SIZES, CostModel
from outrider.engine.policy.timing import Delay
from outrider.engine.rounds import Drafting, chain_round


def defined(costs: CostModel, d: Drafting, limit: int) -> int:
    """`goodput.py`'s first lines, for a row that no others keep company."""
    missed = 1.0 - d.hit_share
    times = costs.draft_times(d)
    longest = 0.0 if times is None or costs.num_rows == 1 else times.longest

    def wait(k: int) -> float:
        if d.runs_ahead:
            return max(0.0, d.wait_s - missed * (costs.delay_s(d) - costs.delay_s(d, k)))
        return missed * costs.delay_s(d, max(k, longest - 1))

    def goodput(k: int) -> float:
        tokens = 1.0 + accepted(d.successes / d.trials, k * d.levels)
        return tokens / (costs.step_s(costs.num_rows * (1 + k)) + wait(k))

    sizes = [*(k for k in SIZES if k < limit), limit]
    best = max(goodput(k) for k in sizes)
    if best <= 1.0 / costs.step_s(costs.num_rows):
        return 0
    return max(k for k in sizes if goodput(k) >= NEARLY * best)


def test_k_is_what_the_formulas_say() -> None:
    chosen = set()
    for seed in range(400):
        rng = random.Random(seed)
        d = Drafting(limit=64, proposer_id="p", drafter="p", runs_ahead=rng.random() < 0.5)
        d.trials = rng.uniform(1.0, 10.0)
        d.successes = d.trials * rng.choice((0.0, 1.0, rng.random()))
        d.levels, d.hit_share = rng.choice((1.0, rng.random())), rng.random()
        d.num_draft_tokens, d.wait_s = rng.randint(0, 8), rng.uniform(0.0, 0.02)
        costs, num_rows = CostModel(), rng.choice((1, 1, 4, 32))
        for tokens in (64 * num_rows, 8 * num_rows, num_rows):
            costs.observe_step(num_rows, tokens, 0.005 + tokens * rng.uniform(0.0, 1e-3))
        for at in range(rng.randint(0, 8)):
            seconds = rng.uniform(0.0, 0.02)
            took = Delay(at, seconds, seconds * rng.random(), rng.randint(1, 8), uncontended=True)
            costs.observe_delay(d, took)
        limit = rng.randint(1, 64)
        k = Goodput(costs, Acceptance()).best_k(d, limit)
        assert k == defined(costs, d, limit), seed
        chosen.add(k)
    assert {0, 1, 2, 3, 4} < chosen


@pytest.mark.parametrize(
    ("num_rows", "runs_ahead", "proposer_id", "waits"),
    [
        (8, False, "good", True),
        (2, False, "good", True),
        (8, True, "good", False),
        (8, False, "bad", False),
        (8, False, "unknown", False),
        (1, False, "good", False),
    ],
)
def test_a_row_of_low_acceptance_waits_with_most_if_its_proposer_is_worth_it(
    num_rows: int, runs_ahead: bool, proposer_id: str, waits: bool
) -> None:
    costs, acceptance = CostModel(), Acceptance()
    for tokens in (5 * num_rows, num_rows):
        costs.observe_step(num_rows, tokens, 0.01 + tokens * 1e-5)
    goodput = Goodput(costs, acceptance)
    rows = {name: Drafting(limit=4, proposer_id=name, drafter="d") for name in ("good", "bad")}
    for name, row in rows.items():
        acceptance.begin(row)
        for _ in range(200):
            acceptance.observe(row, chain_round(4, 4 if name == "good" else 0))
    for ahead in (False, True):
        delayed = Drafting(limit=4, drafter="d", runs_ahead=ahead)
        costs.observe_delay(delayed, Delay(0.0, 0.02, 0.004, 4, uncontended=True))
    poor = Drafting(limit=4, proposer_id=proposer_id, drafter="d", runs_ahead=runs_ahead)
    poor.successes, poor.trials, poor.wait_s, poor.num_draft_tokens = 1.0, 2.0, 0.02, 4
    assert goodput.best_k(poor, 4) == 0, "alone it does not"
    for _ in range(10 * num_rows):
        assert goodput.best_k(rows["good"], 4) > 0
    assert goodput.most_draft
    assert (goodput.best_k(poor, 4) > 0) == waits
    for _ in range(10 * num_rows):
        assert goodput.best_k(rows["bad"], 4) == 0
    assert not goodput.most_draft
    assert goodput.best_k(poor, 4) == 0, "nor once the others have stopped"


def test_nothing_is_compared_before_a_step_was_measured() -> None:
    row = Drafting(limit=4, proposer_id="p", drafter="p")
    Acceptance().begin(row)
    assert Goodput(CostModel(), Acceptance()).best_k(row, 3) == 3
