"""Never, on demand or ahead: the fastest mode is found, and trials of others lose little."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from outrider.policy.base import DraftMode, StepDone
from outrider.policy.mode import MOST_LOST, ModeSelector

MODES = tuple(DraftMode)
OFF, ON_DEMAND, AHEAD = MODES
STEP = StepDone(
    8, 8, 8, 0.0, 0, comparable=True, draftable=8, answered=8, proposer_ids=frozenset("a")
)


def steps_s(on_demand: float, ahead: float | None = None) -> dict[DraftMode, float]:
    """Seconds of a step by mode; `ahead` like `on_demand` by default."""
    return {OFF: 0.010, ON_DEMAND: on_demand, AHEAD: on_demand if ahead is None else ahead}


FAST, SLOW = steps_s(0.025, 0.020), steps_s(0.05)  # drafts pay, and do not, with three tokens


@dataclass
class Load:
    """Steps of `rows` whose drafts bring three tokens."""

    rows: int = 8
    step_s: Mapping[DraftMode, float] = field(default_factory=lambda: FAST)
    tokens: float = 3.0  # of a row in a step with drafts
    temperature: float = 0.0
    prompt_every: int = 0  # steps: then one has a newcomer's prompt
    runs_ahead: bool = True  # the proposer can
    draftable: float = 1.0  # share of rows that may have drafts
    answered: float = 1.0  # share of these that their proposer has heard of while it drafts
    modes: ModeSelector = field(default_factory=ModeSelector)
    now: float = 0.0
    steps: int = 0

    def play(self, steps: int) -> dict[DraftMode, int]:
        """So many steps; how many in each mode."""
        taken, draftable = dict.fromkeys(MODES, 0), round(self.rows * self.draftable)
        for _ in range(steps):
            mode = self.modes.current.mode
            taken[mode] += 1
            self.steps += 1
            prompt = bool(self.prompt_every) and self.steps % self.prompt_every == 0
            self.now += self.step_s[mode] + 0.03 * prompt
            caught_up = mode.drafts and self.answered == 1.0
            self.modes.step_done(
                replace(
                    STEP,
                    num_running=self.rows,
                    num_rows=self.rows,
                    tokens=self.rows + round(draftable * (self.tokens - 1.0) * caught_up),
                    at=self.now,
                    drafted=draftable * caught_up,
                    draftable=draftable,
                    answered=round(draftable * self.answered * mode.drafts),
                    prompt_s=0.03 * prompt,
                    temperature=self.temperature,
                    may_run_ahead=self.runs_ahead,
                )
            )
        return taken

    @property
    def incumbent(self) -> DraftMode:
        return self.modes.current.incumbent


@pytest.mark.parametrize("best", MODES)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_trials_find_the_fastest_mode_and_keep_it(best: DraftMode, rows: int) -> None:
    times = steps_s(0.034)
    load = Load(rows, times | {best: 0.75 * times[best]})
    load.play(3000)
    assert load.incumbent is best
    assert load.play(10_000)[best] > 0.95 * 10_000


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_trials_of_worse_modes_lose_little_time(rows: int) -> None:
    load, steps = Load(rows), 50_000
    load.play(5000)
    taken = load.play(steps)
    tokens = sum([n * (3 if mode.drafts else 1) for mode, n in taken.items()])
    lost_s = sum([n * FAST[mode] for mode, n in taken.items()]) - tokens * FAST[AHEAD] / 3
    assert min(taken.values()) > 0
    assert lost_s < 1.2 * MOST_LOST * steps * FAST[AHEAD]


def test_trials_of_equal_modes_do_not_alternate() -> None:
    load, incumbents = Load(), [AHEAD]
    for i in range(20_000):
        luck = 1.0 + 0.02 * (-1) ** (i // 40)
        load.step_s = steps_s(0.0202 * luck, 0.020 / luck)
        load.play(1)
        if load.incumbent is not incumbents[-1]:
            incumbents.append(load.incumbent)
    assert len(incumbents) <= 3


@pytest.mark.parametrize(
    ("load", "steps", "drafts"),
    [
        pytest.param(Load(100, steps_s(0.0099), tokens=1.0), 2000, False, id="they bring nothing"),
        pytest.param(Load(100, steps_s(0.0099), tokens=1.01), 2000, False, id="next to nothing"),
        pytest.param(Load(8, steps_s(0.025), prompt_every=2), 3000, True, id="beside prompts"),
        pytest.param(Load(8, SLOW, prompt_every=1), 3000, False, id="slow, all prompts"),
        pytest.param(Load(8, steps_s(0.02), prompt_every=1), 3000, True, id="fast, all prompts"),
        pytest.param(Load(64, answered=0.1), 4000, False, id="the proposer never catches up"),
    ],
)
def test_drafts_are_made_where_they_bring_something(load: Load, steps: int, drafts: bool) -> None:
    """Newcomers' prompts do not count as time of a mode, even if every step has one."""
    load.play(steps)
    assert load.incumbent.drafts == drafts
    assert (load.play(4 * steps)[OFF] > 0.8 * 4 * steps) != drafts


@pytest.mark.parametrize("draftable", [0.25, 0.5, 1.0])
def test_first_trial_beside_rows_without_speculation_is_as_short(draftable: float) -> None:
    load = Load(64, steps_s(0.012), draftable=draftable)
    load.play(150)
    assert load.incumbent.drafts


@pytest.mark.parametrize(("before", "after"), [(3000, 10_000), (10_000, 500)])
def test_modes_after_drafts_came_to_bring_less_than_none_are_without(
    before: int, after: int
) -> None:
    load = Load()
    load.play(before)
    load.step_s = SLOW
    load.play(after)
    assert load.incumbent is OFF


def test_unlucky_rounds_after_other_texts_do_not_end_drafts() -> None:
    load, luck, without = Load(1), random.Random(1), 0
    load.play(3000)
    for text in range(10):
        load.temperature = text % 2
        for _ in range(200):
            load.tokens = luck.randint(1, 5)
            without += load.play(1)[OFF]
    assert without < 200


def test_other_texts_begin_trials_of_all_sizes_anew() -> None:
    load = Load(32, SLOW, temperature=1.0)
    load.play(20_000)
    assert load.incumbent is OFF
    load.rows, load.temperature, load.step_s = 4, 0.0, FAST
    load.play(300)
    load.rows = 32
    assert load.play(1000)[OFF] < 200


def test_texts_that_come_back_find_the_mode_that_was_best_for_them() -> None:
    load = Load()
    for _ in range(2):
        load.temperature, load.step_s = 0.0, steps_s(0.034, 0.022)
        load.play(4000)
        load.temperature, load.step_s = 1.0, steps_s(0.022, 0.034)
        load.play(4000)
    load.temperature, load.step_s = 0.0, steps_s(0.034, 0.022)
    assert load.play(50)[AHEAD] > 45, "without another trial"


def test_sizes_of_batch_have_their_own_modes() -> None:
    load = Load(1)
    load.play(3000)
    load.rows, load.step_s = 64, SLOW
    load.play(3000)
    assert load.incumbent is OFF
    assert not load.modes.mode_at((64).bit_length()).drafts
    assert load.modes.mode_at(1).drafts
    load.rows = 1
    load.play(1)
    assert load.modes.current.mode.drafts


def test_sizes_that_come_back_are_not_tried_again_soon() -> None:
    """Loads of many rows begin and end: trials lose as little time as under a steady one."""
    load, drafting = Load(64, SLOW), 0
    load.play(3000)
    for _ in range(10):
        load.rows = 8
        load.play(20)
        load.rows = 64
        drafting += 300 - load.play(300)[OFF]
    assert drafting < 0.02 * 3000


def test_rows_around_a_power_of_two_stay_one_size() -> None:
    """32 requests are 31 whenever an answer ends: no trial ever began."""
    load = Load(32, steps_s(0.012))
    for i in range(400):
        load.rows = 31 + i % 2
        load.play(1)
    assert load.incumbent.drafts


def test_steps_that_cannot_be_compared_change_nothing() -> None:
    modes = ModeSelector()
    for i in range(1000):
        modes.step_done(replace(STEP, at=float(i), comparable=False))
    assert modes.current.mode.drafts


def test_another_proposer_is_tried_although_the_one_before_did_not_pay() -> None:
    load = Load(1, SLOW)
    load.play(2000)
    assert not load.modes.current.mode.drafts
    load.modes.step_done(replace(STEP, num_running=1, proposer_ids=frozenset("b")))
    assert load.modes.current.mode.drafts


def test_ahead_and_on_demand_are_compared_only_if_somebody_runs_ahead() -> None:
    load = Load()
    for i in range(3000):
        load.runs_ahead = i % 3 == 0  # some steps have no such row
        load.play(1)
    assert load.incumbent is AHEAD
    load.runs_ahead, load.step_s = False, steps_s(0.020)
    load.play(1000)
    assert load.play(10_000)[ON_DEMAND] == 0
    load.runs_ahead = True
    assert load.play(10_000)[ON_DEMAND] > 0
