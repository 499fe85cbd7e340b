"""Choose whether to draft at all; proposers that can run ahead choose themselves how far.

Step times and delays say what verifying and waiting cost. Neither says how drafting slows steps on
the same device, nor how many rows have their drafts ahead in time. So both modes are timed, in
committed tokens per second of all rows, and trials of the slower one lose little of the time.
"""

from __future__ import annotations

import math

from outrider.averages import OUTLIER, Average
from outrider.bounded import remember
from outrider.policy.base import StepDone
from outrider.policy.row import SAMPLED_TEMPERATURE

WORTH = 1.03  # times as fast as no drafts or as the incumbent: less is noise
FEWEST_STEPS, MOST_STEPS = 16, 128  # of a trial: fewer rows need more steps to compare
SETTLING_ROUNDS = 8  # of each row at most after a change: drafts and delays are of before
MOST_LOST = 0.002  # of the time, by trials: of a steady load more of them tell nothing
STAYS = 0.75  # times what begins a size or a kind; it takes more to end it
MANY_ROWS = 16  # begin without drafts where nothing is known of them: a trial costs less


class Speed:
    """Tokens and seconds of a round of all rows, in the mean of about `window` steps."""

    def __init__(self, window: float) -> None:
        self.tokens, self.seconds = Average(window), Average(window)

    @property
    def rate(self) -> float:
        """Committed tokens of a row per second; 0 if unknown."""
        return self.tokens.mean / self.seconds.mean if self.seconds.mean else 0.0


class ModeTrials:
    """Compares drafting with not drafting for one size of batch, beginning with `incumbent`."""

    def __init__(self, num_rows: int, *, incumbent: bool) -> None:
        self.drafting = self.incumbent = incumbent  # now, and but for a trial
        self.catching_up = False  # most rows' prompts were not yet processed by a proposer
        self._num_rows = num_rows
        self._trial_steps = max(FEWEST_STEPS, min(MOST_STEPS, 4 * MOST_STEPS // num_rows))
        self._speeds = {mode: Speed(3.0 * self._trial_steps) for mode in (False, True)}
        self._steps_left = float(self._trial_steps)  # of a trial, or until one
        self._lost_steps = self._last_s = 0.0  # by the trial, in the incumbent's; of the last step
        self.settle()

    @property
    def on_trial(self) -> bool:
        return self.drafting is not self.incumbent

    def settle(self) -> None:
        """Compare none of the next steps: something changed."""
        rounds = min(SETTLING_ROUNDS, self._trial_steps / 4)
        self.settling = rounds if self.drafting else rounds / 2

    def observe(self, step: StepDone, seconds: float) -> None:
        """Take in a step, and the time since the step before."""
        rounds, drafted = step.num_rows / step.num_running, step.drafted / step.num_running
        tokens, drafting = step.tokens / step.num_running, self.drafting
        current, best = self._speeds[drafting], self._speeds[self.incumbent]
        usual_s = current.seconds.mean or max(best.seconds.mean, self._last_s)
        seconds = self._last_s = min(seconds, OUTLIER * usual_s or seconds)  # a machine may pause
        in_vain = step.in_vain_s / seconds / step.num_running if seconds > 0.0 else 0.0
        if self.on_trial and best.rate:
            self._lost_steps += (seconds - tokens / best.rate) / best.seconds.mean
        self.catching_up &= 2 * step.answered * rounds <= 1  # the step's rows stand for all
        if self.settling > 0.0:
            if drafting:  # it ends in any case, though no proposer catches up or nothing is drafted
                drafted = max(drafted * (not self.catching_up), in_vain * self.on_trial)
                rounds = max(drafted, rounds / FEWEST_STEPS)
            self.settling -= rounds
            return
        if seconds > 0.0:
            current.tokens.add(tokens / rounds, rounds)
            current.seconds.add(seconds / rounds, rounds)
            # While the incumbent drafts, steps without any draft count by what was made in vain.
            self._steps_left -= rounds if self.on_trial or drafted or not drafting else in_vain
        if not self.on_trial:
            self._begin_if_due()
        else:
            self._end_if_decided()

    def _begin_if_due(self) -> None:
        """Try the other mode if it is time, or if no drafts were faster than these."""
        plain, drafted = (self._speeds[mode].rate for mode in (False, self.incumbent))
        if self._steps_left > 0.0 and plain <= WORTH * drafted:
            return
        self.drafting = self.catching_up = not self.incumbent
        self._steps_left, self._lost_steps = float(self._trial_steps), 0.0
        self._speeds[self.drafting] = Speed(3.0 * self._trial_steps)
        self.settle()

    def _end_if_decided(self) -> None:
        """End the trial after its steps, or as soon as it is more than bad luck that it loses."""
        tried, best = self._speeds[self.drafting].rate, self._speeds[self.incumbent].rate
        rows = min(4, self._num_rows) if self.drafting else self._num_rows  # a wait slows all rows
        compared = rows * (self._trial_steps - self._steps_left)
        if self._steps_left > 0.0 and tried >= best * (1.0 - 2.0 / math.sqrt(max(1.0, compared))):
            return
        self._steps_left = max(MOST_STEPS, self._lost_steps / MOST_LOST)
        if tried > best * (WORTH if self.drafting else 1.0):
            self._steps_left, self.incumbent = float(self._trial_steps), self.drafting
        self.drafting = self.incumbent
        self.settle()


class ModeSelector:
    """Runs trials by size of batch, in powers of two, and for greedy and for sampled texts.

    Each begins with what was better at the size or kind before it, and a size or a kind stays while
    little changes. The time that prompts take is left out: it comes with every text.
    """

    def __init__(self) -> None:
        self._proposers: dict[str, None] = {}  # that are known
        self._last_step_at = 0.0
        self._restart()

    def _restart(self) -> None:
        """Forget every trial: drafts' costs were other proposers'."""
        self._size, self._sampled = 1, False
        self.current = ModeTrials(1, incumbent=True)
        self._known = {(1, False): self.current}

    def step_done(self, step: StepDone) -> None:
        """Take in a step."""
        for proposer_id in step.proposer_ids - self._proposers.keys():
            remember(self._proposers, proposer_id, None)
            self._restart()
        before, self._last_step_at = self._last_step_at, step.at
        if not self._change(step.num_running, step.temperature) and step.comparable:
            self.current.observe(step, step.at - before - step.prompt_s)

    def _change(self, num_rows: int, temperature: float) -> bool:
        """Go on with other trials if the batch's size or the texts have changed. True if so."""
        least = 1 << self._size - 1  # rows of this size
        most = max(2, 2 * least - 1)  # two requests, one after the other, are one as often
        size = self._size if STAYS * least <= num_rows <= most else num_rows.bit_length()
        sampled = temperature >= SAMPLED_TEMPERATURE * (STAYS if self._sampled else 1.0)
        if (size, sampled) == (self._size, self._sampled):
            return False
        new = ModeTrials(1 << size - 1, incumbent=self.drafting_at(size))
        self.current = self._known.setdefault((size, sampled), new)
        self.current.settle()
        self._size, self._sampled = size, sampled
        return True

    def drafting_at(self, size: int) -> bool:
        """Return whether a number of rows has drafts, by its bit length."""
        if abs(size - self._size) <= 1:
            return self.current.drafting  # it stays the same if only a few rows come or go
        if known := self._known.get((size, self._sampled)):
            return known.incumbent
        return 1 << size <= MANY_ROWS and self.current.incumbent
