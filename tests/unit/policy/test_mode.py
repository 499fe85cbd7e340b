"""Never, on demand or ahead: the fastest mode is found, and trials of others lose little."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.policy.base import DraftMode, StepDone
from outrider.policy.mode import MOST_LOST, ModeSelector

MODES = tuple(DraftMode)
OFF, ON_DEMAND, AHEAD = MODES


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
    fewer: int = 0  # rows in every second step
    runs_ahead: bool = True  # the proposer can
    comparable: bool = True
    draftable: float = 1.0  # share of rows that may have drafts
    answered: float = 1.0  # share of these that their proposer has heard of while it drafts
    proposer: str = "a"
    modes: ModeSelector = field(default_factory=ModeSelector)
    now: float = 0.0
    steps: int = 0

    def play(self, steps: int, **changes: Any) -> dict[DraftMode, int]:
        """Make `changes` and play so many steps; return how many were in each mode."""
        for name, value in changes.items():
            setattr(self, name, value)
        taken = dict.fromkeys(MODES, 0)
        for _ in range(steps):
            mode, rows = self.modes.current.mode, self.rows - self.steps % 2 * self.fewer
            taken[mode] += 1
            self.steps += 1
            prompt_s = 0.03 * (bool(self.prompt_every) and self.steps % self.prompt_every == 0)
            self.now += self.step_s[mode] + prompt_s
            draftable = round(rows * self.draftable)
            drafted = draftable * (mode.drafts and self.answered == 1.0)
            self.modes.step_done(
                StepDone(
                    num_running=rows,
                    num_rows=rows,
                    tokens=rows + round(drafted * (self.tokens - 1.0)),
                    at=self.now,
                    drafted=drafted,
                    comparable=self.comparable,
                    draftable=draftable,
                    answered=round(draftable * self.answered * mode.drafts),
                    prompt_s=prompt_s,
                    temperature=self.temperature,
                    proposer_ids=frozenset(self.proposer),
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
        load.play(1, step_s=steps_s(0.0202 * luck, 0.020 / luck))
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
        pytest.param(Load(64, steps_s(0.012), draftable=0.25), 150, True, id="a quarter drafts"),
        pytest.param(Load(64, steps_s(0.012)), 150, True, id="all draft"),
        pytest.param(Load(32, steps_s(0.012), fewer=1), 400, True, id="32 and 31 rows in turn"),
    ],
)
def test_drafts_are_made_where_they_bring_something(load: Load, steps: int, drafts: bool) -> None:
    """Newcomers' prompts do not count as time of a mode, even if every step has one."""
    load.play(steps)
    assert load.incumbent.drafts == drafts
    assert (load.play(4 * steps)[OFF] > 0.8 * 4 * steps) != drafts


FASTER_AHEAD = {"step_s": steps_s(0.034, 0.022), "temperature": 0.0}
FASTER_ON_DEMAND = {"step_s": steps_s(0.022, 0.034), "temperature": 1.0}
SLOW_SAMPLED = {"rows": 32, "step_s": SLOW, "temperature": 1.0}


@pytest.mark.parametrize(
    ("phases", "last", "modes"),
    [
        ([(3000, {}), (10_000, {"step_s": SLOW})], (400, {}), {OFF}),
        ([(10_000, {}), (500, {"step_s": SLOW})], (400, {}), {OFF}),
        ([(20_000, SLOW_SAMPLED)], (400, {}), {OFF}),
        (
            [(20_000, SLOW_SAMPLED), (300, {"rows": 4, "step_s": FAST, "temperature": 0.0})],
            (1000, {"rows": 32}),
            {ON_DEMAND, AHEAD},
        ),
        ([(4000, FASTER_AHEAD), (4000, FASTER_ON_DEMAND)] * 2, (50, FASTER_AHEAD), {AHEAD}),
        ([(2000, {"rows": 1, "step_s": SLOW})], (400, {}), {OFF}),
        (
            [(2000, {"rows": 1, "step_s": SLOW}), (1, {"proposer": "b"})],
            (10, {}),
            {ON_DEMAND, AHEAD},
        ),
        ([(1000, {"comparable": False, "step_s": SLOW})], (100, {}), {ON_DEMAND, AHEAD}),
    ],
    ids=[
        "drafts came to bring less than none",
        "and soon",
        "drafts that do not pay",
        "other texts begin trials of all sizes anew",
        "texts that come back find their mode at once",
        "another proposer's drafts did not pay",
        "another proposer is tried at once",
        "steps that cannot be compared",
    ],
)
def test_mode_follows_rows_texts_and_proposers(
    phases: list[tuple[int, Any]], last: tuple[int, Any], modes: set[DraftMode]
) -> None:
    load = Load()
    for steps, changes in phases:
        load.play(steps, **changes)
    taken = load.play(last[0], **last[1])
    assert sum([taken[mode] for mode in modes]) >= 0.8 * last[0]


def test_unlucky_rounds_after_other_texts_do_not_end_drafts() -> None:
    load, luck, without = Load(1), random.Random(1), 0
    load.play(3000)
    for text in range(10):
        for _ in range(200):
            without += load.play(1, temperature=text % 2, tokens=luck.randint(1, 5))[OFF]
    assert without < 200


def test_sizes_of_batch_have_their_own_modes_and_are_not_tried_again_soon() -> None:
    """Loads of many rows begin and end: trials lose as little time as under a steady one."""
    load, drafting = Load(1), 0
    load.play(3000)
    load.play(3000, rows=64, step_s=SLOW)
    assert load.incumbent is OFF
    assert not load.modes.mode_at((64).bit_length()).drafts
    assert load.modes.mode_at(1).drafts
    for _ in range(10):
        load.play(20, rows=8)
        drafting += 300 - load.play(300, rows=64)[OFF]
    assert drafting < 0.02 * 3000
    load.play(1, rows=1)
    assert load.modes.current.mode.drafts


def test_loads_of_twice_as_many_rows_are_compared_for_themselves() -> None:
    """128 requests that came one after the other ended the drafts of 64, for which these paid."""
    load = Load(1)
    for rows, step_s in ((128, SLOW), (64, FAST)):
        for arrived in (rows // 8, rows // 2, 3 * rows // 4, rows):
            load.play(2, rows=arrived, step_s=step_s)
        load.play(3000)
        assert load.incumbent.drafts == (step_s is FAST)
        assert load.modes._size == rows.bit_length()


def test_ahead_and_on_demand_are_compared_only_if_somebody_runs_ahead() -> None:
    load = Load()
    for i in range(3000):
        load.play(1, runs_ahead=i % 3 == 0)  # some steps have no such row
    assert load.incumbent is AHEAD
    load.play(1000, runs_ahead=False, step_s=steps_s(0.020))
    assert load.play(10_000)[ON_DEMAND] == 0
    assert load.play(10_000, runs_ahead=True)[ON_DEMAND] > 0
