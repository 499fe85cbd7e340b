"""Drafting against not drafting, by trial."""

from __future__ import annotations

import pytest

from outrider.engine.contest import (
    FIRST_STRETCH,
    LONGEST_SETTLING,
    LONGEST_STRETCH,
    SHORTEST_STRETCH,
    TRIAL_STEPS,
    Contest,
    Contests,
)
from outrider.engine.measured import StepDone


def play(contest: Contest, steps: int, *, with_s: float, without_s: float, tokens: int = 3) -> int:
    """`steps` steps, of `tokens` with drafts and 1 without; how many were with drafts."""
    drafted = 0
    for _ in range(steps):
        if contest.drafting:
            drafted += 1
            contest.observe(tokens, with_s, drafted=True)
        else:
            contest.observe(1, without_s, drafted=False)
    return drafted


def test_drafts_that_pay_are_rarely_done_without() -> None:
    contest = Contest()
    assert play(contest, 10_000, with_s=0.012, without_s=0.010) > 0.99 * 10_000


def test_drafts_that_cost_more_than_they_bring_are_rarely_made() -> None:
    contest = Contest()
    assert play(contest, 10_000, with_s=0.040, without_s=0.010) < 0.03 * 10_000


@pytest.mark.parametrize("with_s", [0.032, 0.040, 0.060, 0.120])
def test_the_worse_the_other_way_the_more_seldom_it_is_tried(with_s: float) -> None:
    contest = Contest(SHORTEST_STRETCH)
    play(contest, 20 * SHORTEST_STRETCH, with_s=with_s, without_s=0.010)
    steps = 3000
    drafted = play(contest, steps, with_s=with_s, without_s=0.010)
    lost_s = drafted * (with_s - 3 * 0.010)
    assert lost_s < 0.02 * steps * 0.010
    assert drafted > 0, "it is tried"


def test_a_trial_whose_drafts_the_policy_gives_up_ends_like_any_other() -> None:
    contest = Contest(SHORTEST_STRETCH)
    play(contest, 4 * SHORTEST_STRETCH, with_s=0.040, without_s=0.010)
    while not contest.drafting:
        contest.observe(1, 0.010, drafted=False)
    contest.observe(3, 0.040, drafted=True)
    steps = 0
    while contest.drafting:
        contest.observe(1, 0.010, drafted=False)
        steps += 1
    assert steps <= LONGEST_SETTLING + TRIAL_STEPS


def test_one_accident_ends_nothing_for_long() -> None:
    contest = Contest(SHORTEST_STRETCH)
    play(contest, 3 * SHORTEST_STRETCH, with_s=0.040, without_s=0.010)
    assert not contest.drafting
    while not contest.drafting:
        play(contest, 1, with_s=0.012, without_s=0.010)
    play(contest, 10, with_s=1.0, without_s=0.010)  # the trial meets a machine that stands still
    assert not contest.drafting
    without = 0
    while not contest.drafting:
        without += 1
        play(contest, 1, with_s=0.012, without_s=0.010)
    assert without < LONGEST_STRETCH / 4


def test_a_change_is_noticed_at_the_next_trial() -> None:
    contest = Contest()
    play(contest, 20 * FIRST_STRETCH, with_s=0.040, without_s=0.010)
    assert not contest.drafting
    play(contest, 2 * LONGEST_STRETCH, with_s=0.012, without_s=0.010)
    assert contest.drafting


def test_what_falls_behind_the_other_way_is_tried_against_it_soon() -> None:
    contest = Contest()
    play(contest, 20_000, with_s=0.012, without_s=0.010)  # trials are thousands of steps apart
    assert contest.drafting
    assert play(contest, 1000, with_s=0.045, without_s=0.010) < 250


def test_noise_changes_nothing() -> None:
    contest = Contest()
    drafted = play(contest, 10_000, with_s=0.0303, without_s=0.0100)  # 1 % apart
    assert drafted > 0.97 * 10_000


def test_without_a_proposer_nothing_is_decided() -> None:
    contest = Contest()
    for _ in range(1000):
        contest.observe(1, 0.01, drafted=False)
    assert contest.drafting


def test_steps_that_bring_no_token_decide_nothing() -> None:
    """As where every answer is one token: the step after it brings a stop, and no token."""
    contest, drafted = Contest(), 0
    for _ in range(1000):
        drafted += contest.drafting
        contest.observe(0, 0.010, drafted=contest.drafting)
    assert drafted > 900


def test_each_size_of_batch_has_its_own_answer() -> None:
    contests, now, drafted = Contests(), 0.0, {1: 0, 32: 0}
    for rows, step_s in ((1, 0.012), (32, 0.040), (1, 0.012), (32, 0.040)):
        for _ in range(2000):
            drafts = contests.drafting
            drafted[rows] += drafts
            now += step_s if drafts else 0.010
            tokens = 3 if drafts else 1
            contests.step_done(StepDone(rows, rows, tokens, now, rows * drafts, comparable=True))
    assert drafted[1] > 0.98 * 4000
    assert drafted[32] < 0.06 * 4000
    assert contests.undrafted_sizes == {(32).bit_length()}


def test_steps_with_prompts_are_not_compared() -> None:
    contests, now = Contests(), 0.0
    for i in range(4000):
        drafts, comparable = contests.drafting, i % 2 == 0
        now += 0.012 if comparable else 1.0
        contests.step_done(StepDone(1, 1, 3 if drafts else 1, now, drafts, comparable))
    assert contests.drafting


def test_rows_that_wait_for_their_first_drafts_do_not_end_a_trial() -> None:
    """32 rows, as simulated: drafts were off, and their proposer first processes prompts."""
    contests, now = Contests(), 0.0

    def play(steps: int, *, rows: int, drafted: int, tokens: int, step_s: float) -> None:
        nonlocal now
        for _ in range(steps):
            now += step_s
            contests.step_done(StepDone(32, rows, tokens, now, drafted, comparable=True))

    play(1, rows=32, drafted=32, tokens=32, step_s=0.0055)
    while contests.drafting:  # a shared device slows its steps
        play(1, rows=32, drafted=32, tokens=96, step_s=0.030)
    while not contests.drafting:
        play(1, rows=32, drafted=0, tokens=32, step_s=0.0055)
    play(2, rows=1, drafted=1, tokens=3, step_s=0.005)
    play(6, rows=14, drafted=14, tokens=40, step_s=0.010)  # 4,000 tokens/s, of 5,800 without
    assert contests.drafting
    play(60, rows=32, drafted=32, tokens=96, step_s=0.012)
    assert contests.drafting


def test_one_long_step_of_many_rows_ends_nothing() -> None:
    """A kernel of a new size was compiled for 0.1 s within the first eight steps of 32 rows."""
    contests, now, drafted = Contests(), 0.0, 0
    for i in range(200):
        drafts = contests.drafting
        drafted += drafts
        now += 0.1 if i == 8 else (0.0125 if drafts else 0.0055)
        tokens = 96 if drafts else 32
        contests.step_done(StepDone(32, 32, tokens, now, 32 * drafts, comparable=True))
    assert drafted > 150


def test_a_size_met_while_answers_end_begins_as_the_one_before() -> None:
    """Rows of 32 that are not to draft would all ask for drafts as soon as they are 31."""
    contests, now, drafted = Contests(), 0.0, 0
    for i in range(300):
        rows, drafts = (32 if i < 280 else 300 - i), contests.drafting
        drafted += drafts * (i >= 280)
        now += 0.030 if drafts else 0.0055
        tokens = rows * (3 if drafts else 1)
        contests.step_done(StepDone(rows, rows, tokens, now, rows * drafts, comparable=True))
    assert not drafted
