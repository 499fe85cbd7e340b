"""Texts that change while modes are tried: trials cost little of the time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from outrider.engine.policy.draft_mode import DraftMode
from outrider.engine.policy.mode_selector import MODES
from outrider.engine.policy.mode_trials import INTERVAL, MOST_LOST, ModeTrials

OFF, ON_DEMAND, AHEAD = MODES
STEP_S = {OFF: 0.010, ON_DEMAND: 0.020, AHEAD: 0.020}


def of_eight_rows() -> ModeTrials:
    return ModeTrials(16, modes=MODES, incumbent=AHEAD, trial_steps=64)


def of_one_row() -> ModeTrials:
    return ModeTrials(INTERVAL, modes=MODES, incumbent=AHEAD, trial_steps=INTERVAL)


@dataclass
class Texts:
    """Steps whose tokens follow from what each mode brings, as a multiple of none."""

    trials: ModeTrials
    on_demand: float = 1.0
    ahead: float = 1.0
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 0.0
    lost_s: float = 0.0  # by other modes than ahead
    taken: list[DraftMode] = field(default_factory=list)

    def play(self, steps: int) -> list[DraftMode]:
        """So many steps; in which mode each."""
        for _ in range(steps):
            mode = self.trials.mode
            seconds, brings = STEP_S[mode], {ON_DEMAND: self.on_demand, AHEAD: self.ahead}
            mean = seconds * 100 * brings.get(mode, 1.0)
            tokens = mean * max(0.0, 1 + mode.drafts * self.rng.gauss(0.0, self.noise))
            self.trials.observe(tokens, seconds, drafted=float(mode.drafts))
            self.now += seconds
            self.lost_s += seconds * (1 - brings.get(mode, 1.0) / self.ahead)
            self.taken.append(mode)
        return self.taken[-steps:]

    def change(self, ahead: tuple[float, float], share: float, steps: tuple[int, int]) -> None:
        """2,000 seconds of texts for so many steps each, at least and at most; on demand brings
        that share of ahead."""
        while self.now < 2000:
            self.ahead = ahead[0] if self.rng.random() < 0.5 else ahead[1]
            self.on_demand = share * self.ahead
            self.play(self.rng.randrange(*steps))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_trials_of_one_row_with_changing_answers_lose_little(seed: int) -> None:
    """914 tokens/s with one answer, 550 with the next, of 250 without drafts."""
    texts = Texts(of_one_row(), noise=0.3, rng=random.Random(seed))
    texts.change(ahead=(3.6, 2.2), share=0.65, steps=(40, 160))
    assert OFF in texts.taken
    assert texts.lost_s < MOST_LOST * texts.now


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_trials_of_eight_rows_with_changing_texts_lose_little(seed: int) -> None:
    texts = Texts(of_eight_rows(), noise=0.2, rng=random.Random(seed))
    texts.change(ahead=(1.8, 1.3), share=0.8, steps=(200, 2000))
    assert texts.lost_s < MOST_LOST * texts.now
