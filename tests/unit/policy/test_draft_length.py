"""K by expected goodput equals its formulas, written down plainly."""

from __future__ import annotations

import random

import pytest

from outrider.draft_port import DraftOffer
from outrider.engine.policy.acceptance import Acceptance
from outrider.engine.policy.cost_model import SIZES, CostModel
from outrider.engine.policy.draft_length import NEARLY, DraftLength
from outrider.engine.policy.row import Drafting
from outrider.engine.policy.timing import Delay
from outrider.engine.rounds import chain_round


def drafting(proposer_id: str, *, runs_ahead: bool = False) -> Drafting:
    d = Drafting(limit=64, proposer=DraftOffer(proposer_id, 64), runs_ahead=runs_ahead)
    d.drafter = "d"
    return d


def defined(costs: CostModel, d: Drafting, limit: int) -> int:
    """Write down the formulas of draft_length.py, for a row with which no others wait."""
    missed = 1.0 - d.hits.share
    times = costs.draft_times(d)
    longest = 0.0 if times is None or costs.num_rows == 1 else times.longest

    def wait(k: int) -> float:
        if d.runs_ahead:
            return max(
                0.0,
                d.hits.wait_s
                - missed * (costs.delay_s(d, d.num_draft_tokens) - costs.delay_s(d, k)),
            )
        return missed * costs.delay_s(d, max(k, longest - 1))

    def goodput(k: int) -> float:
        tokens = 1.0 + d.acceptance.expected_accepted(k)
        return tokens / (costs.step_s(costs.num_rows * (1 + k)) + wait(k))

    sizes = [*(k for k in SIZES if k < limit), limit]
    best = max(goodput(k) for k in sizes)
    if best <= 1.0 / costs.step_s(costs.num_rows):
        return 0
    return max(k for k in sizes if goodput(k) >= NEARLY * best)


def test_draft_length_for_random_rows_equals_formulas() -> None:
    chosen = set()
    for seed in range(400):
        rng = random.Random(seed)
        d = drafting("p", runs_ahead=rng.random() < 0.5)
        d.acceptance.trials = rng.uniform(1.0, 10.0)
        d.acceptance.successes = d.acceptance.trials * rng.choice((0.0, 1.0, rng.random()))
        d.acceptance.levels, d.hits.share = rng.choice((1.0, rng.random())), rng.random()
        d.num_draft_tokens, d.hits.wait_s = rng.randint(0, 8), rng.uniform(0.0, 0.02)
        costs, num_rows = CostModel(), rng.choice((1, 1, 4, 32))
        for tokens in (64 * num_rows, 8 * num_rows, num_rows):
            costs.observe_step(num_rows, tokens, 0.005 + tokens * rng.uniform(0.0, 1e-3))
        for _ in range(rng.randint(0, 8)):
            seconds = rng.uniform(0.0, 0.02)
            took = Delay(seconds, seconds * rng.random(), rng.randint(1, 8), uncontended=True)
            costs.observe_delay(d, took)
        limit = rng.randint(1, 64)
        k = DraftLength(costs, Acceptance()).best_k(d, limit)
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
def test_draft_length_of_poor_row_among_drafting_rows_waits_if_proposer_is_good(
    num_rows: int, runs_ahead: bool, proposer_id: str, waits: bool
) -> None:
    costs, acceptance = CostModel(), Acceptance()
    for tokens in (5 * num_rows, num_rows):
        costs.observe_step(num_rows, tokens, 0.01 + tokens * 1e-5)
    length = DraftLength(costs, acceptance)
    rows = {name: drafting(name) for name in ("good", "bad")}
    for name, row in rows.items():
        for _ in range(200):
            round_ = chain_round(4, 4 if name == "good" else 0)
            acceptance.observe(row.acceptance, name, round_, sampled=False)
    for ahead in (False, True):
        costs.observe_delay(drafting("", runs_ahead=ahead), Delay(0.02, 0.004, 4, uncontended=True))
    poor = drafting(proposer_id, runs_ahead=runs_ahead)
    poor.acceptance.successes, poor.acceptance.trials = 1.0, 2.0
    poor.hits.wait_s, poor.num_draft_tokens = 0.02, 4
    assert length.best_k(poor, 4) == 0, "alone it does not"
    for _ in range(10 * num_rows):
        assert length.best_k(rows["good"], 4) > 0
    assert (length.best_k(poor, 4) > 0) == waits
    for _ in range(10 * num_rows):
        assert length.best_k(rows["bad"], 4) == 0
    assert length.best_k(poor, 4) == 0, "nor once the others have stopped"


def test_draft_length_without_measured_step_is_limit() -> None:
    assert DraftLength(CostModel(), Acceptance()).best_k(drafting("p"), 3) == 3
