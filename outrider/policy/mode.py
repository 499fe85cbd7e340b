"""Choose how drafts are made: never, on demand, or ahead.

Step times say what verifying costs, and delays what waiting costs. Neither says what drafting costs
the steps beside it, where both share a device, nor how many rows have their drafts ahead in time.
So the modes are timed, in committed tokens per second of all rows. The best one goes on, and the
others are tried in turn, so seldom that trials lose little of the time.

The best mode depends on the number of rows and on the texts. So it is found for each size of batch,
by powers of two, and for sampled texts apart from others.
"""

from __future__ import annotations

import math

from outrider.averages import OUTLIER, Average
from outrider.policy.base import DraftMode, StepDone
from outrider.policy.measurements import remember
from outrider.policy.row import SAMPLED_TEMPERATURE

WORTH = 1.03  # times as fast as no drafts or as the incumbent: less is noise
FEWEST_STEPS, MOST_STEPS = 16, 128  # of a trial: fewer rows need more steps to compare
SETTLING_ROUNDS = 8  # of each row after a change: until then drafts and delays are of before
MOST_LOST = 0.01  # of the time, by trials; and so many steps they are where nothing changes
MANY_ROWS = 16  # begin without drafts where nothing is known of them: a trial costs less


class Speed:
    """Committed tokens of a row over about the last `window` steps in one mode."""

    def __init__(self, window: float) -> None:
        self._kept = 1.0 - 1.0 / window
        self._tokens = self._seconds = self._steps = 0.0
        self.rate = self.step_s = 0.0  # tokens per second, and mean seconds of a step, if known

    def add(self, tokens: float, seconds: float, steps: float) -> None:
        """Take in a step, or a share of one."""
        if seconds > 0.0 and steps > 0.0:
            self._tokens = self._kept * self._tokens + tokens
            self._seconds = self._kept * self._seconds + seconds
            self._steps = self._kept * self._steps + steps
            self.rate, self.step_s = self._tokens / self._seconds, self._seconds / self._steps


class ModeTrials:
    """Compares modes for one size of batch and kind of texts, beginning with `incumbent`.

    Steps are counted by rounds, the share of all rows that take part: a step of 4 rows of 32 is an
    eighth of one.
    """

    def __init__(self, num_rows: int, modes: tuple[DraftMode, ...], incumbent: DraftMode) -> None:
        self.mode = self.incumbent = incumbent  # now, and but for a trial
        self.decided = False  # by a trial
        self.catching_up = 0  # steps at the most until a proposer has processed prompts
        self._num_rows = num_rows
        self._trial_steps = max(FEWEST_STEPS, min(MOST_STEPS, 4 * MOST_STEPS // num_rows))
        self._speeds = {mode: Speed(3.0 * self._trial_steps) for mode in modes}
        self._last_tried = incumbent
        self._untried = {mode for mode in modes if mode is not incumbent}
        self._interval = self._steps_left = float(self._trial_steps)  # of a trial, or until one
        self._lost_steps = 0.0  # by the trial, worth of the incumbent's
        self.settle()

    def take_over(self, before: ModeTrials) -> None:
        """Go on from trials with other texts: what no drafts bring hardly depends on them."""
        self.decided |= before.decided
        if before._speeds[DraftMode.OFF].rate:
            self._speeds[DraftMode.OFF] = before._speeds[DraftMode.OFF]

    @property
    def on_trial(self) -> bool:
        """True if the mode is not the incumbent."""
        return self.mode is not self.incumbent

    @property
    def step_s(self) -> float:
        """Mean seconds of a step without its prompts; 0 if none was measured."""
        return self._speeds[self.mode].step_s or self._speeds[self.incumbent].step_s

    def settle(self) -> None:
        """Compare none of the next steps: something changed."""
        self.settling = SETTLING_ROUNDS if self.mode.drafts else SETTLING_ROUNDS / 2

    def observe(self, step: StepDone, seconds: float) -> None:
        """Take in a step, and the time since the step before."""
        rounds, drafted = step.num_rows / step.num_running, step.drafted / step.num_running
        tokens, drafts = step.tokens / step.num_running, self.mode.drafts
        current, best = self._speeds[self.mode], self._speeds[self.incumbent]
        if typical_s := max(current.step_s, best.step_s):
            seconds = min(seconds, OUTLIER * typical_s)
        if self.on_trial and best.rate:
            self._lost_steps += (seconds - tokens / best.rate) / best.step_s
        if self.catching_up:
            self._catch_up(step.answered / step.num_running)
        elif self.settling > 0.0:
            # Settling ends in any case, though nothing is drafted.
            self.settling -= max(drafted, rounds / SETTLING_ROUNDS) if drafts else rounds
        else:
            current.add(tokens, seconds, rounds)
            # While the incumbent drafts, steps without any draft bring no trial nearer.
            self._steps_left -= rounds if self.on_trial or drafted or not drafts else 0.0
            if self.on_trial and (self._steps_left <= 0.0 or self._is_lost()):
                self._end(self._is_better())
            elif self._steps_left <= 0.0:
                self._begin()

    def _begin(self) -> None:
        """Try the next mode in turn, or one that is known to be faster."""
        modes = list(self._speeds)
        after = modes.index(self._last_tried) + 1
        turn = [mode for mode in modes[after:] + modes if mode is not self.incumbent]
        known = max(turn, key=lambda mode: self._speeds[mode].rate)
        is_faster = self._speeds[known].rate > WORTH * self._speeds[self.incumbent].rate
        self.mode = self._last_tried = known if is_faster else turn[0]
        self._untried.discard(self.mode)
        self.catching_up = 0 if self.incumbent.drafts else 4 * MOST_STEPS
        self._steps_left, self._lost_steps = float(self._trial_steps), 0.0
        self._speeds[self.mode] = Speed(3.0 * self._trial_steps)
        self.settle()

    def _catch_up(self, answered: float) -> None:
        """Wait until most rows are `answered` and can be compared, but not for ever."""
        self.catching_up = 0 if answered > 0.5 else self.catching_up - 1
        if not self.catching_up and answered <= 0.5:
            self._end(won=False)

    def _is_lost(self) -> bool:
        tried, best = self._speeds[self.mode], self._speeds[self.incumbent]
        compared = self._trial_steps - self._steps_left
        luck = 2.0 / math.sqrt(max(1.0, self._num_rows * compared))  # of so many rounds
        return self.incumbent.drafts and tried.rate < (1.0 - luck) * best.rate

    def _is_better(self) -> bool:
        tried, best = self._speeds[self.mode], self._speeds[self.incumbent]
        if self.mode.drafts:  # they shorten no step: where they bring no tokens, less was luck
            return tried.rate > WORTH * best.rate and tried.rate * tried.step_s >= 1.0
        return tried.rate * WORTH > best.rate

    def _end(self, won: bool) -> None:
        lost_steps = self._lost_steps
        if won:  # a trial of the mode before would lose what this one gained
            lost_steps *= -self._speeds[self.incumbent].step_s / self._speeds[self.mode].step_s
            self._last_tried, self.incumbent = self.incumbent, self.mode
        self.mode, self.decided = self.incumbent, True
        longer = min(max(MOST_STEPS, 2 * self._interval), self._trial_steps / MOST_LOST)
        self._interval = self._trial_steps if won else longer
        if self._untried:  # one of them may be far better
            self._steps_left = float(self._trial_steps)
        else:
            self._steps_left = max(self._interval, lost_steps / MOST_LOST)
        self.settle()


class ModeSelector:
    """Runs trials by size of batch and kind of texts.

    A size begins with what was better at the size before it, and a kind of texts with what was
    better with the other kind. A number of rows that goes up and down around a power of two stays
    one size, and so does a mean temperature between `SAMPLED_TEMPERATURE` and its half.

    What a prompt takes without drafts is taken off its step. What it takes more, drafts cost. Until
    that is known, steps with prompts are left out, unless all have some, as with many rows.
    """

    def __init__(self) -> None:
        self._proposers: dict[str, None] = {}  # that are known
        self._runs_ahead = True  # one of them can
        self._steps_without = 0  # a row whose proposer can, since the last with one
        self._last_step_at: float | None = None
        self._prompt_token_s = Average()  # without drafts
        self._prompts_before = 0  # tokens, in steps of prompts only since the last other step
        self._left_out = 0  # steps in a row whose prompts take a time that is not known
        self._restart()

    def _restart(self) -> None:
        """Forget every trial: there are other proposers, or other modes."""
        self._modes = modes = tuple(DraftMode) if self._runs_ahead else tuple(DraftMode)[:2]
        self._size, self._sampled = 1, False
        self.current = ModeTrials(1, modes, modes[-1])
        self._known = {(1, False): self.current}

    def step_done(self, step: StepDone) -> None:
        """Take in a step."""
        self._note_proposers(step)
        if step.prompts_only:  # its time is that of the round which the others wait for
            self._prompts_before += step.prompt_tokens
            return
        prompt_tokens, self._prompts_before = step.prompt_tokens + self._prompts_before, 0
        before, self._last_step_at = self._last_step_at, step.at
        changed = self._change(step.num_running, step.temperature)
        if changed or not step.comparable or before is None:
            return
        prompts_s = self._prompts_s(prompt_tokens, step.at - before)
        if prompts_s is not None:
            self.current.observe(step, max(0.0, step.at - before - prompts_s))

    def _prompts_s(self, prompt_tokens: int, seconds: float) -> float | None:
        """Return what prompts took of a step's time; None to leave the step out."""
        if not prompt_tokens:
            self._left_out = 0
            return 0.0
        current, per_token = self.current, self._prompt_token_s
        if current.settling <= 0.0 and not current.mode.drafts and current.step_s:
            per_token.add_time(max(0.0, seconds - current.step_s) / prompt_tokens)
        self._left_out += not per_token.weight
        if not per_token.weight and self._left_out <= FEWEST_STEPS:
            return None
        return prompt_tokens * per_token.mean

    def _note_proposers(self, step: StepDone) -> None:
        """Begin anew with a new proposer, as drafts' costs were others', or with other modes."""
        unknown = step.proposer_ids - self._proposers.keys()
        self._steps_without = 0 if step.may_run_ahead else self._steps_without + 1
        seen = bool(self._proposers) and self._steps_without < MOST_STEPS
        runs_ahead = step.may_run_ahead or (seen and self._runs_ahead)
        for proposer_id in unknown:
            remember(self._proposers, proposer_id, None)
        if unknown or (self._proposers and runs_ahead is not self._runs_ahead):
            self._runs_ahead = runs_ahead
            self._restart()

    def _change(self, num_rows: int, temperature: float) -> bool:
        """Go on with other trials if the batch's size or kind has changed. True if it has."""
        least = 1 << self._size - 1  # rows of this size; the most are 2 * least - 1
        same_size = 3 * least <= 4 * num_rows < 10 * least
        size = self._size if same_size else num_rows.bit_length()
        sampled = temperature >= SAMPLED_TEMPERATURE / (2 if self._sampled else 1)
        if same_size and sampled is self._sampled:
            return False
        before = self.current
        if (size, sampled) not in self._known:
            incumbent = before.incumbent if same_size else self.mode_at(size)
            self._known[size, sampled] = ModeTrials(1 << size - 1, self._modes, incumbent)
        self._size, self._sampled, self.current = size, sampled, self._known[size, sampled]
        if same_size:
            self.current.take_over(before)
        self.current.settle()
        return True

    def mode_at(self, size: int) -> DraftMode:
        """Return the mode of a number of rows, by its bit length."""
        if abs(size - self._size) <= 1:
            return self.current.mode  # it stays the same if only a few rows come or go
        if (size, self._sampled) in self._known:
            return self._known[size, self._sampled].incumbent
        decided = self.current.decided or size < MANY_ROWS.bit_length()
        return self.current.incumbent if decided else DraftMode.OFF
