"""Drafting against not drafting, by trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.engine.policy.base import StepDone
from outrider.engine.policy.draft_mode import DraftMode
from outrider.engine.policy.mode_selector import MANY_ROWS, ModeSelector
from outrider.engine.policy.mode_trials import (
    CAUGHT_UP,
    FIRST_LOSS,
    INTERVAL,
    LEAST_DRAFTED,
    LONGEST_CATCH_UP,
    LONGEST_INTERVAL,
    MOST_LOST,
    SETTLING_DRAFTS,
    SETTLING_STEPS,
    TRIAL_STEPS,
    ModeTrials,
)


def step(*args: Any, **fields: Any) -> StepDone:
    return StepDone(*args, proposer_ids=frozenset({"a"}), **fields)


def play(
    trials: ModeTrials, steps: int, *, with_s: float, without_s: float, tokens: int = 3
) -> int:
    """`steps` steps, of `tokens` with drafts and 1 without; how many were with drafts."""
    drafted = 0
    for _ in range(steps):
        if trials.mode.drafts:
            drafted += 1
            trials.observe(tokens, with_s, drafted=True)
        else:
            trials.observe(1, without_s, drafted=False)
    return drafted


def rate_of(
    trials: ModeTrials,
    steps: int,
    with_s: Callable[[int], float],
    *,
    without_s: float,
    share: float = 1.0,
) -> float:
    """Tokens per second of `steps` steps, of 3 tokens with drafts and 1 without.

    `with_s` is told how many steps had drafts since the last one without, this one too. Of all
    rows the `share` drafts, and has been answered.
    """
    time_s, tokens, in_a_row = 0.0, 0, 0
    for _ in range(steps):
        drafts = trials.mode.drafts
        in_a_row = in_a_row + 1 if drafts else 0
        step_s, got = (with_s(in_a_row), 3) if drafts else (without_s, 1)
        trials.observe(got, step_s, drafted=share * drafts, answered=share)
        time_s, tokens = time_s + step_s, tokens + got
    return tokens / time_s


def test_trials_with_drafts_that_pay_keep_drafting() -> None:
    trials = ModeTrials()
    assert play(trials, 10_000, with_s=0.012, without_s=0.010) > 0.99 * 10_000


def test_trials_with_costly_drafts_stop_drafting() -> None:
    trials = ModeTrials()
    assert play(trials, 10_000, with_s=0.040, without_s=0.010) < 0.03 * 10_000


@pytest.mark.parametrize("with_s", [0.032, 0.040, 0.060, 0.120])
def test_trials_of_worse_mode_lose_little_time(with_s: float) -> None:
    trials = ModeTrials(TRIAL_STEPS)
    play(trials, 20 * TRIAL_STEPS, with_s=with_s, without_s=0.010)
    steps = 20_000
    drafted = play(trials, steps, with_s=with_s, without_s=0.010)
    lost_s = drafted * (with_s - 3 * 0.010)
    assert lost_s < 0.02 * steps * 0.010
    assert drafted > 0, "it is tried"


def test_trial_without_further_drafts_ends() -> None:
    trials = ModeTrials(TRIAL_STEPS)
    play(trials, 4 * TRIAL_STEPS, with_s=0.040, without_s=0.010)
    while not trials.mode.drafts:
        trials.observe(1, 0.010, drafted=False)
    trials.observe(3, 0.040, drafted=True)
    steps = 0
    while trials.mode.drafts:
        trials.observe(1, 0.010, drafted=False)
        steps += 1
    assert steps <= SETTLING_DRAFTS / LEAST_DRAFTED + 3 * TRIAL_STEPS


def test_trials_after_one_accident_draft_again() -> None:
    trials = ModeTrials(TRIAL_STEPS)
    play(trials, 3 * TRIAL_STEPS, with_s=0.040, without_s=0.010)
    assert not trials.mode.drafts
    while not trials.mode.drafts:
        play(trials, 1, with_s=0.012, without_s=0.010)
    play(trials, 10, with_s=1.0, without_s=0.010)  # the trial meets a machine that stands still
    assert not trials.mode.drafts
    without = 0
    while not trials.mode.drafts:
        without += 1
        play(trials, 1, with_s=0.012, without_s=0.010)
    assert without < 2 * FIRST_LOSS / MOST_LOST


def test_trials_after_change_find_new_best_mode() -> None:
    trials = ModeTrials()
    play(trials, 20 * INTERVAL, with_s=0.040, without_s=0.010)
    assert not trials.mode.drafts
    play(trials, 2 * LONGEST_INTERVAL, with_s=0.012, without_s=0.010)
    assert trials.mode.drafts


def test_trials_with_falling_incumbent_compare_soon() -> None:
    trials = ModeTrials()
    play(trials, 20_000, with_s=0.012, without_s=0.010)  # trials are thousands of steps apart
    assert trials.mode.drafts
    assert play(trials, 1000, with_s=0.045, without_s=0.010) < 250


@pytest.mark.parametrize(("with_s", "made"), [(0.0303, False), (0.0297, False), (0.0270, True)])
def test_trials_with_small_gain_do_not_draft(with_s: float, made: bool) -> None:
    """What is no faster than none costs a device for nothing: 1 % slower, 1 % and 11 % faster."""
    drafted = play(ModeTrials(), 10_000, with_s=with_s, without_s=0.0100)
    assert (drafted > 0.97 * 10_000) if made else (drafted < 0.1 * 10_000)


def test_trials_of_drafts_without_tokens_are_lost() -> None:
    trials = ModeTrials(TRIAL_STEPS, incumbent=DraftMode.OFF)
    assert 0 < play(trials, 10_000, with_s=0.0090, without_s=0.010, tokens=1) < 0.1 * 10_000


def test_trials_without_drafts_decide_nothing() -> None:
    trials = ModeTrials()
    for _ in range(1000):
        trials.observe(1, 0.01, drafted=False)
    assert trials.mode.drafts


def test_trials_without_tokens_decide_nothing() -> None:
    """As where every answer is one token: the step after it brings a stop, and no token."""
    trials, drafted = ModeTrials(), 0
    for _ in range(1000):
        drafted += trials.mode.drafts
        trials.observe(0, 0.010, drafted=trials.mode.drafts)
    assert drafted > 900


def test_selector_decides_by_batch_size() -> None:
    selector, now, drafted = ModeSelector(), 0.0, {1: 0, 32: 0}
    for rows, step_s in ((1, 0.012), (32, 0.040), (1, 0.012), (32, 0.040)):
        for _ in range(2000):
            drafts = selector.current.mode.drafts
            drafted[rows] += drafts
            now += step_s if drafts else 0.010
            tokens = 3 if drafts else 1
            selector.step_done(
                StepDone(rows, rows, tokens, now, rows * drafts, comparable=True, answered=rows)
            )
    assert drafted[1] > 0.98 * 4000
    assert drafted[32] < 0.06 * 4000
    assert (32).bit_length() in selector.undrafted_sizes
    assert 1 not in selector.undrafted_sizes


@dataclass
class Kinds:
    """32 rows, of which some texts are met by drafts: 3 tokens in 12 ms with drafts, else in 40."""

    selector: ModeSelector = field(default_factory=ModeSelector)
    now: float = 0.0
    lost_s: float = 0.0

    def play(self, steps: int, temperature: float, *, answered: int = 32) -> int:
        """So many steps; how many with drafts."""
        drafted = 0
        for _ in range(steps):
            drafts = self.selector.current.mode.drafts
            drafted += drafts
            seconds = 0.010
            if drafts and not self.selector.current.catching_up:
                seconds = 0.012 if temperature < 0.5 else 0.040
            self.now += seconds
            verifies = 32 * (seconds != 0.010)
            tokens = 96 if verifies else 32
            self.lost_s += seconds - tokens / 32 * 0.010
            self.selector.step_done(
                step(
                    32,
                    32,
                    tokens,
                    self.now,
                    verifies,
                    comparable=True,
                    answered=answered,
                    temperature=temperature,
                )
            )
        return drafted


def test_selector_after_sampled_texts_drafts_greedy_ones() -> None:
    """At T = 1 trials are thousands of steps apart; 20 s of chats at T = 0 went without drafts."""
    kinds = Kinds()
    kinds.play(20_000, 1.0)
    assert kinds.play(1000, 1.0) < 50
    assert kinds.play(300, 0.0) > 250


def test_selector_with_two_kinds_of_texts_remembers_both() -> None:
    kinds = Kinds()
    kinds.play(2000, 1.0)
    kinds.play(2000, 0.0)
    assert kinds.play(300, 1.0) == 1, "of which that is heard with its end"
    kinds.play(1, 0.0)
    assert kinds.selector.current.catching_up, "its proposer catches up before anybody waits"
    assert kinds.play(300, 0.0) > 290


def test_selector_with_proposer_that_does_not_catch_up_stops_drafting() -> None:
    kinds = Kinds()
    kinds.play(2000, 0.0)
    kinds.play(2000, 1.0)
    kinds.play(LONGEST_CATCH_UP + 2, 0.0, answered=0)
    assert not kinds.selector.current.mode.drafts


def test_selector_after_change_to_hard_texts_stops_drafting_soon() -> None:
    """What none brings is known from the other kind, so a quarter of a trial is enough."""
    kinds = Kinds()
    kinds.play(2000, 0.0)
    assert kinds.play(300, 1.0) <= 1 + SETTLING_STEPS + TRIAL_STEPS // 4


def test_selector_with_mixed_texts_keeps_one_kind() -> None:
    kinds, seen = Kinds(), set()
    kinds.play(10, 1.0)
    for i in range(100):
        kinds.play(3, 0.3 + 0.4 * (i % 2))
        seen.add(id(kinds.selector.current))
    assert len(seen) == 1


def test_selector_with_alternating_kinds_loses_little() -> None:
    kinds = Kinds()
    for _ in range(200):
        kinds.play(50, 1.0)
        kinds.play(50, 0.0)
    assert kinds.lost_s < 0.0, "drafts go on to pay"


def test_selector_ignores_incomparable_steps() -> None:
    selector, now = ModeSelector(), 0.0
    for i in range(4000):
        drafts, comparable = selector.current.mode.drafts, i % 2 == 0
        now += 0.012 if comparable else 1.0
        selector.step_done(step(1, 1, 3 if drafts else 1, now, drafts, comparable, 1))
    assert selector.current.mode.drafts


def test_selector_adds_prompt_steps_to_waiting_round() -> None:
    """Else drafts that are waited for would seem to take no time."""
    selector, now = ModeSelector(), 0.0

    def play(tokens: int, seconds: float, drafted: int, prompt_tokens: int) -> None:
        nonlocal now
        now += seconds
        selector.step_done(step(32, 32, tokens, now, drafted, True, 32, prompt_tokens))

    for i in range(4000):
        if selector.current.mode.drafts:
            now += 0.012  # until the drafts come
            selector.step_done(step(32, 1, 1, now, 0, False, 32, 100, prompts_only=True))
            play(96, 0.008, drafted=32, prompt_tokens=0)
        elif i % 2:
            play(32, 0.005, drafted=0, prompt_tokens=0)
        else:
            play(32, 0.008, drafted=0, prompt_tokens=100)
    assert not selector.current.incumbent.drafts, "32 tokens in 5 ms are more than 96 in 20 - 3"


def test_selector_trial_survives_rows_without_first_drafts() -> None:
    """32 rows, as simulated: drafts were off, and their proposer first processes prompts."""
    selector, now = ModeSelector(), 0.0

    def play(steps: int, *, rows: int, drafted: int, tokens: int, step_s: float) -> None:
        nonlocal now
        for _ in range(steps):
            now += step_s
            selector.step_done(
                StepDone(32, rows, tokens, now, drafted, comparable=True, answered=32)
            )

    play(1, rows=32, drafted=32, tokens=32, step_s=0.0055)
    while selector.current.mode.drafts:  # a shared device slows its steps
        play(1, rows=32, drafted=32, tokens=96, step_s=0.030)
    while not selector.current.mode.drafts:
        play(1, rows=32, drafted=0, tokens=32, step_s=0.0055)
    play(2, rows=1, drafted=1, tokens=3, step_s=0.005)
    play(6, rows=14, drafted=14, tokens=40, step_s=0.010)  # 4,000 tokens/s, of 5,800 without
    assert selector.current.mode.drafts
    play(30, rows=32, drafted=32, tokens=96, step_s=0.012)
    assert selector.current.incumbent.drafts, "they won"


def test_selector_with_one_long_step_keeps_mode() -> None:
    """A kernel of a new size was compiled for 0.1 s within the first eight steps of 32 rows."""
    selector, now, drafted = ModeSelector(), 0.0, 0
    for i in range(200):
        drafts = selector.current.mode.drafts
        drafted += drafts
        now += 0.1 if i == 8 else (0.0125 if drafts else 0.0055)
        tokens = 96 if drafts else 32
        selector.step_done(step(32, 32, tokens, now, 32 * drafts, comparable=True, answered=32))
    assert drafted > 150


def test_selector_at_new_size_begins_with_mode_of_neighbour() -> None:
    """Rows of 32 that are not to draft would all ask for drafts as soon as they are 31."""
    selector, now, drafted = ModeSelector(), 0.0, 0
    for i in range(300):
        rows, drafts = (32 if i < 280 else 300 - i), selector.current.mode.drafts
        drafted += drafts * (i >= 280)
        now += 0.030 if drafts else 0.0055
        tokens = rows * (3 if drafts else 1)
        selector.step_done(
            StepDone(rows, rows, tokens, now, rows * drafts, comparable=True, answered=rows)
        )
    assert not drafted


@dataclass
class Load:
    """Steps of `rows` that come and go: every `prompt_every`-th step has a newcomer's prompt."""

    rows: int = 32
    prompt_every: int = 3
    with_s: float = 0.0125  # a step with drafts, of three tokens a row
    without_s: float = 0.0055
    prompt_s: float = 0.010  # a newcomer adds without drafts,
    extra_s: float = 0.0  # and with drafts, because its proposer has a prompt to process, too
    selector: ModeSelector = field(default_factory=ModeSelector)
    now: float = 0.0
    drafted: int = 0
    steps: int = 0
    lost_s: float = 0.0  # by drafts, to none

    def step(self, *, step_s: float | None = None, answered: int | None = None) -> None:
        """One; `answered` rows are known to their proposer. By default drafts bring tokens."""
        self.steps += 1
        newcomer = self.steps % self.prompt_every == 0
        running = self.rows - newcomer  # one more answer has ended
        drafts = self.selector.current.mode.drafts and answered is None
        self.drafted += drafts
        seconds = (self.with_s if drafts else self.without_s) if step_s is None else step_s
        tokens = running * (3 if drafts else 1)
        self.lost_s += seconds + drafts * newcomer * self.extra_s - tokens / running * 0.0055
        self.now += seconds + newcomer * (self.prompt_s + drafts * self.extra_s)
        self.selector.step_done(
            step(
                running,
                running,
                tokens,
                self.now,
                running * drafts,
                comparable=True,
                answered=running if answered is None else answered,
                prompt_tokens=270 * newcomer,
            )
        )

    def play(self, steps: int) -> int:
        """So many steps; of how many drafts were verified."""
        before = self.drafted
        for _ in range(steps):
            self.step()
        return self.drafted - before


def test_selector_around_power_of_two_keeps_one_size() -> None:
    """32 requests are 31 whenever an answer ends: no trial ever began."""
    load = Load(with_s=0.030)
    load.play(300)
    assert load.play(3000) < 0.05 * 3000


@pytest.mark.parametrize(("extra_s", "pays"), [(0.0, True), (0.015, False)])
def test_selector_counts_what_drafts_cost_newcomers(extra_s: float, pays: bool) -> None:
    """17.6 ms a round of three tokens instead of 16.5 are too many, of which 5 are newcomers'."""
    load = Load(with_s=0.0126, extra_s=extra_s)
    load.play(500)
    drafted = load.play(3000)
    assert (drafted > 0.95 * 3000) if pays else (drafted < 0.1 * 3000)


def test_selector_with_more_newcomers_keeps_mode() -> None:
    """During a trial, or after it: their prompts take what they take without drafts."""
    load = Load(prompt_every=9)
    load.play(1000)
    load.prompt_every = 2
    assert load.play(1000) > 0.95 * 1000


def test_selector_while_proposer_catches_up_compares_nothing() -> None:
    load = Load()
    load.step()
    while not load.selector.current.mode.drafts:
        load.step()
    assert load.selector.current.catching_up
    for _ in range(100):  # other rows' prompts are processed: hardly a step is slower
        load.step(step_s=0.0056, answered=int(CAUGHT_UP * 31) - 1)
    assert load.selector.current.catching_up
    load.step(answered=32)
    assert load.selector.current.mode.drafts
    assert not load.selector.current.catching_up
    assert load.play(500) > 0.95 * 500


def test_selector_after_costly_trial_allows_next_to_cost_more() -> None:
    """On a shared device 32 prompts at the proposer slow down the steps by half, for a second."""
    load, catching_up, catches_up_after = Load(), 0, 60
    losses = []
    for _ in range(20_000):
        began = load.selector.current.catching_up
        if began and catching_up < catches_up_after:
            catching_up += 1
            load.step(step_s=0.011, answered=8)
        else:
            load.step()
        if began and not load.selector.current.catching_up:
            losses.append(catching_up)
            catching_up = 0
    assert losses[0] == pytest.approx(FIRST_LOSS, abs=2)
    assert losses[1] == pytest.approx(2 * FIRST_LOSS, abs=2) or losses[1] == catches_up_after
    assert load.play(100) > 90, "then it was long enough"


def test_selector_with_proposer_that_never_catches_up_loses_little() -> None:
    load = Load()
    for _ in range(30_000):
        if load.selector.current.mode.drafts:
            load.step(step_s=0.011, answered=8)
        else:
            load.step()
    assert 0.0 < load.lost_s < 1.5 * MOST_LOST * load.now


def test_selector_with_many_rows_begins_without_drafts() -> None:
    """What drafts cost them is found out by a trial, which may not lose much."""
    selector = ModeSelector()
    assert selector.current.mode.drafts
    assert all(
        (size in selector.undrafted_sizes) == (size >= MANY_ROWS.bit_length()) for size in (4, 5)
    )
    load = Load(selector=selector)
    load.step()
    assert not load.selector.current.mode.drafts


def test_trials_forget_what_drafts_brought_long_ago() -> None:
    """They pay less and less, till none are made. Then all is slower, and their proposer, too.

    It answers so few rows that no trial comes to compare anything.
    """
    trials, with_s, without_s = ModeTrials(TRIAL_STEPS), 0.012, 0.010
    play(trials, 20 * INTERVAL, with_s=with_s, without_s=without_s)
    while trials.incumbent.drafts:
        play(trials, 20, with_s=with_s, without_s=without_s)
        with_s *= 1.01
    rate = rate_of(trials, 5000, lambda _: 0.060, without_s=0.0118, share=0.1)
    assert rate > 0.95 / 0.0118
