"""Drafts or none: the faster mode is found, and trials of the other lose little."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from operator import is_not
from typing import Any

import pytest

from outrider.policy.base import StepDone
from outrider.policy.mode import MOST_LOST, ModeSelector

MODES = OFF, ON = False, True
# Seconds of a step by mode. With three tokens drafts pay, and do not; and pay if few rows draft.
FAST, SLOW, FEW = ({OFF: 0.010, ON: drafted_s} for drafted_s in (0.020, 0.05, 0.012))


@dataclass
class Load:
    """Steps of `rows` whose drafts bring three tokens."""

    rows: int = 8
    step_s: dict[bool, float] = field(default_factory=lambda: FAST)
    tokens: float = 3.0  # of a row in a step with drafts
    temperature: float = 0.0
    prompt_every: int = 0  # steps: then one has a newcomer's prompt
    fewer: int = 0  # rows in every second step
    comparable: bool = True
    answered: float = 1.0  # share of these that their proposer has heard of while it drafts
    in_vain: float = 0.0  # share of the time that late drafts take while it drafts
    proposer: str = "a"
    modes: ModeSelector = field(default_factory=ModeSelector)
    now: float = 0.0
    steps: int = 0

    def play(self, steps: int, **changes: Any) -> dict[bool, int]:
        """Make `changes` and play so many steps; return how many were in each mode."""
        vars(self).update(changes)
        taken = dict.fromkeys(MODES, 0)
        for _ in range(steps):
            mode, rows = self.modes.current.drafting, self.rows - self.steps % 2 * self.fewer
            taken[mode] += 1
            self.steps += 1
            prompt_s = 0.03 * (bool(self.prompt_every) and self.steps % self.prompt_every == 0)
            self.now += (step_s := self.step_s[mode]) + prompt_s
            drafted = rows * (mode and self.answered == 1.0)
            tokens = rows + round(drafted * (self.tokens - 1.0))
            counts = rows, rows, tokens, self.now, drafted, self.comparable, self.answered * mode
            texts = prompt_s, self.temperature, frozenset(self.proposer)
            self.modes.step_done(StepDone(*counts, *texts, self.in_vain * mode * rows * step_s))
        return taken


@pytest.mark.parametrize("best", MODES)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_trials_find_the_faster_mode_and_lose_little_time(best: bool, rows: int) -> None:
    times = {OFF: 0.010, ON: 0.0255} if best else {OFF: 0.0075, ON: 0.034}
    load, steps = Load(rows, times), 50_000
    load.play(5000)
    assert load.modes.current.incumbent is best
    taken = load.play(steps)
    token_s = {mode: times[mode] / (3 if mode else 1) for mode in MODES}
    lost_s = sum([n * times[m] * (1 - token_s[best] / token_s[m]) for m, n in taken.items()])
    assert min(taken.values()) > 0
    assert lost_s < 1.1 * MOST_LOST * steps * times[best], "rows come back without their drafts"


def test_one_slow_step_does_not_end_a_trial_of_many_rows() -> None:
    load = Load(64, FEW)
    while not load.modes.current.on_trial or load.modes.current.settling > 0.0:
        load.play(1)
    load.play(1, step_s=SLOW)
    load.play(30, step_s=FEW)
    assert load.modes.current.incumbent is ON


@pytest.mark.parametrize("steps", [0, 1, 8, 20])
def test_pause_in_a_trial_does_not_put_the_next_one_off_for_long(steps: int) -> None:
    """As where the first drafts after so many steps of the trial compile their code."""
    load = Load(8, SLOW)
    load.play(3000)
    while not load.modes.current.on_trial:
        load.play(1)
    load.play(2, answered=0.4)
    assert load.modes.current.catching_up, "most proposers have not answered"
    load.play(steps, answered=1.0)
    load.play(1, step_s={OFF: 0.010, ON: 10.0})
    load.play(100, step_s=SLOW)
    assert load.modes.current.incumbent is OFF
    assert load.play(40_000, step_s=FAST)[ON] > 10_000


def test_trials_of_equal_modes_do_not_alternate() -> None:
    load, incumbents = Load(), [ON]
    for i in range(20_000):
        luck = 1.0 + 0.02 * (-1) ** (i // 40)
        load.play(1, step_s={OFF: 0.0101 * luck, ON: 0.030 / luck})
        incumbents.append(load.modes.current.incumbent)
    assert sum(map(is_not, incumbents, incumbents[1:])) <= 2


PAYS, DOES_NOT = ({"step_s": s, "temperature": t} for s, t in ((FAST, 0.0), (SLOW, 1.0)))
OTHER_TEXTS = [(20_000, {"rows": 32, **DOES_NOT}), (300, {"rows": 4, **PAYS})]
MIXED = [(2, {"temperature": temperature}) for temperature in (0.5, 0.4) * 500]
ALTERNATING = [(4000, PAYS), (4000, DOES_NOT)] * 2
ARRIVING = [
    (2 if part < 8 else 3000, {"rows": part * rows, "step_s": times})
    for rows, times in ((16, SLOW), (8, FAST))
    for part in (1, 4, 6, 8)
]
# Phases are steps and what changes with them. In most of the last ones the modes are these.
CASES: dict[str, tuple[Load, list[Any], Any, set[bool]]] = {
    "no tokens gained": (Load(100, {OFF: 0.010, ON: 0.0099}, tokens=1.0), [2000], 8000, {OFF}),
    "slow, all prompts": (Load(8, SLOW, prompt_every=1), [3000], 12_000, {OFF}),
    "fast, all prompts": (Load(8, prompt_every=1), [3000], 12_000, {ON}),
    "the proposer never catches up": (Load(64, answered=0.1), [4000], 16_000, {OFF}),
    "drafts come too late": (Load(8, FEW, answered=0.9, in_vain=0.4), [600], 4000, {OFF}),
    "nothing is guessed": (Load(8, FEW, answered=0.9), [600], 4000, {ON}),
    "32 and 31 rows in turn": (Load(32, FEW, fewer=1), [400], 1600, {ON}),
    "no gain any more": (Load(), [10_000, (500, {"step_s": SLOW})], 400, {OFF}),
    "drafts that do not pay": (Load(), [(20_000, {"rows": 32, **DOES_NOT})], 400, {OFF}),
    "other texts begin all sizes anew": (Load(), OTHER_TEXTS, (1000, {"rows": 32}), {ON}),
    "mixed texts are of one kind": (Load(8, SLOW), MIXED, 40, {OFF}),
    "texts come back": (Load(), ALTERNATING, (50, PAYS), {ON}),
    "a proposer's drafts do not pay": (Load(1, SLOW), [2000], 400, {OFF}),
    "another's are tried": (Load(1, SLOW), [2000, (1, {"proposer": "b"})], 10, {ON}),
    "not comparable": (Load(8, SLOW, comparable=False), [1000], 100, {ON}),
    "128 came one by one, then 64": (Load(1), ARRIVING, 400, {ON}),
}


@pytest.mark.parametrize(("load", "phases", "last", "modes"), CASES.values(), ids=list(CASES))
def test_mode_follows_the_load(load: Load, phases: list[Any], last: Any, modes: set[bool]) -> None:
    """Newcomers' prompts do not count as time of a mode, even if every step has one."""
    for phase in (*phases, last):
        steps, changes = phase if isinstance(phase, tuple) else (phase, {})
        taken = load.play(steps, **changes)
    assert sum([taken[mode] for mode in modes]) >= 0.8 * steps


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
    assert load.modes.current.incumbent is OFF
    assert [load.modes.drafting_at(rows.bit_length()) for rows in (64, 1)] == [False, True]
    for _ in range(10):
        load.play(20, rows=8)
        drafting += 300 - load.play(300, rows=64)[OFF]
    assert drafting < 0.02 * 3000
    load.play(1, rows=1)
    assert load.modes.current.drafting
