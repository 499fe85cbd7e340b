"""Ahead, on demand, or no drafts: the fastest way is found, and left when it is not any more."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from outrider.engine.policy.adaptive import AdaptivePolicy
from outrider.engine.policy.mode import HOPELESS_AFTER, TRIAL_STEPS, DraftMode
from outrider.engine.policy.mode_selector import WAYS_AHEAD
from outrider.engine.policy.mode_trials import MOST_LOST, SETTLING_DRAFTS, STRETCH, ModeTrials
from outrider.engine.policy.timing import Delay, StepDone
from outrider.params import SamplingParams
from outrider.types import Request
from tests.support.simulators.two_devices import TwoDevices

NONE, ON_DEMAND, AHEAD = WAYS_AHEAD
STEP_S = {NONE: 0.010, ON_DEMAND: 0.025, AHEAD: 0.020}  # of 1 and 3 tokens


def play(
    contest: ModeTrials, steps: int, step_s: Mapping[DraftMode, float] = STEP_S
) -> dict[DraftMode, int]:
    """So many steps; how many in each way."""
    taken = dict.fromkeys(WAYS_AHEAD, 0)
    for _ in range(steps):
        way = contest.way
        taken[way] += 1
        contest.observe(3 if way.drafts else 1, step_s[way], drafted=float(way.drafts))
    return taken


@pytest.mark.parametrize("first", WAYS_AHEAD)
@pytest.mark.parametrize("best", WAYS_AHEAD)
def test_the_fastest_way_is_found_from_any_other(first: DraftMode, best: DraftMode) -> None:
    step_s = {NONE: 0.010, ON_DEMAND: 0.034, AHEAD: 0.034}
    step_s[best] *= 0.75
    contest = ModeTrials(TRIAL_STEPS, ways=WAYS_AHEAD, incumbent=first)
    play(contest, 16 * STRETCH, step_s)
    assert contest.incumbent is best
    assert play(contest, 10_000, step_s)[best] > 0.95 * 10_000


def test_trials_of_two_other_ways_lose_no_more_than_those_of_one() -> None:
    contest = ModeTrials(ways=WAYS_AHEAD, incumbent=AHEAD)
    play(contest, 20 * STRETCH)
    steps = 50_000
    taken = play(contest, steps)
    tokens = sum([n * (3 if way.drafts else 1) for way, n in taken.items()])
    lost_s = sum([n * STEP_S[way] for way, n in taken.items()]) - tokens * STEP_S[AHEAD] / 3
    assert taken[NONE] > 0
    assert taken[ON_DEMAND] > 0
    assert lost_s < 1.2 * MOST_LOST * steps * STEP_S[AHEAD]


def test_a_hopeless_trial_of_another_way_to_draft_ends_early() -> None:
    """One request: a proposer that drafts already needs no time to catch up."""
    contest = ModeTrials(ways=WAYS_AHEAD, incumbent=AHEAD)
    step_s = {**STEP_S, ON_DEMAND: 0.035}
    while contest.way is not ON_DEMAND:
        play(contest, 1, step_s)
    taken = play(contest, 100, step_s)
    assert taken[ON_DEMAND] <= SETTLING_DRAFTS + HOPELESS_AFTER + 1


def test_ways_to_draft_that_bring_the_same_do_not_alternate() -> None:
    contest, changes, incumbent = ModeTrials(ways=WAYS_AHEAD, incumbent=AHEAD), 0, AHEAD
    for i in range(20_000):
        luck = 1.0 + 0.02 * (-1) ** (i // 40)
        play(contest, 1, {**STEP_S, ON_DEMAND: 0.0202 * luck, AHEAD: 0.020 / luck})
        changes += contest.incumbent is not incumbent
        incumbent = contest.incumbent
    assert changes <= 2


def test_what_drafts_take_on_demand_is_not_what_they_take_beside_branches() -> None:
    policy = AdaptivePolicy(4)
    row = policy.drafting(Request(0, (1,), SamplingParams(temperature=0.0)))
    row.proposer_id = row.drafter = "a"
    row.can_run_ahead = True
    policy.expect(row, "a")
    assert policy.way is not DraftMode.ON_DEMAND, "one request drafts ahead"

    def observe(seconds: float) -> None:
        for at in range(20):
            policy.observe_delay(row, Delay(float(at), seconds, 0.005, 4, uncontended=True))

    now = 0.0
    row.runs_ahead = True
    observe(0.030)
    row.runs_ahead = False
    observe(0.004)  # of one row
    while policy.way is not DraftMode.ON_DEMAND:
        now += 0.005
        drafts = policy.may_wait
        done = StepDone(1, 1, 1 + 2 * drafts, now, drafts, comparable=True, followed=1)
        policy.step_done(done._replace(may_run_ahead=True))
    assert ("a", False) not in policy._costs._drafts, "measured anew, with the rows that there are"
    assert policy._costs._drafts["a", True].mean_s(4) == pytest.approx(0.030)


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


def test_drafts_that_pay_in_no_way_are_not_made() -> None:
    world = TwoDevices(32, 1.0)
    world.rate(2.0)
    assert world.rate(6.0) > 0.97 * rate_without(32)
