"""K by expected goodput equals its formulas, written down plainly."""

from __future__ import annotations

import random

from outrider.engine.acceptance import Acceptance, accepted
from outrider.engine.costs import SIZES, Costs
from outrider.engine.goodput import NEARLY, Goodput
from outrider.engine.measured import Delay
from outrider.engine.rounds import Drafting


def defined(costs: Costs, d: Drafting, limit: int) -> int:
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
        costs, num_rows = Costs(), rng.choice((1, 1, 4, 32))
        for tokens in (64 * num_rows, 8 * num_rows, num_rows):
            costs.observe_step(num_rows, tokens, 0.005 + tokens * rng.uniform(0.0, 1e-3))
        for at in range(rng.randint(0, 8)):
            seconds = rng.uniform(0.0, 0.02)
            took = Delay(at, seconds, seconds * rng.random(), rng.randint(1, 8), calm=True)
            costs.observe_delay(d, took)
        limit = rng.randint(1, 64)
        k = Goodput(costs, Acceptance()).best_k(d, limit)
        assert k == defined(costs, d, limit), seed
        chosen.add(k)
    assert {0, 1, 2, 3, 4} < chosen
