"""Whether to draft ahead, on demand or not at all, by trying each mode for a moment.

Step times say what verifying costs, and delays what waiting costs. Neither says what drafting costs
the steps beside it, where proposer and scorer share cores, a GPU or a memory's bandwidth; nor how
many rows have their drafts ahead in time. So all modes are timed, in committed tokens per second of
all rows. The best one goes on. The others are tried again in turn, at intervals that double as long
as nothing changes, and at which trials lose little of the time. A trial also ends when it has lost
what it may; the next one may lose more.

Steps are counted by rounds, the share of all rows that take part: a step of 4 rows of 32 is an
eighth of one. A proposer that was not asked for a while first processes the rows' prompts: they go
on meanwhile and wait for nothing, and nothing is compared until it has answered most of them and
each could have drafted a few times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from outrider.engine.policy.draft_mode import DraftMode

WORTH = 1.03  # times as fast as no drafts or as the incumbent: less is noise
TRIAL_STEPS = 16  # to compare at least: many rows differ little by luck, few rows need more
HOPELESS = 0.8  # of the speed that a trial needs: a worse one ends early
FEW_STEPS = 3  # of `TRIAL_STEPS`, after which that may be said
SETTLING_STEPS = 3  # after a change: drafts of before are used up
SETTLING_DRAFTS = 8  # of each row in a trial: until then it is not known what drafts take
LEAST_DRAFTED = 1 / 16  # of the rows counts as drafted in a step: settling ends in any case
CAUGHT_UP = 0.75  # of the rows: a proposer that has answered so many has caught up
LONGEST_CATCH_UP = 512  # steps until then at the latest
LONGEST_STEP = 4.0  # times the mean: more of a step is an accident, as a kernel's compilation
INTERVAL, LONGEST_INTERVAL = 128, 4096  # steps between two trials
MOST_LOST = 0.01  # of the time, by trials of worse modes
FIRST_LOSS, LARGEST_LOSS = 32, 256  # steps' worth that one trial may lose; doubles in between
FELL_BEHIND = 1.05  # times as fast was another mode when it was last tried: it is tried again
CLEARLY = 1.25  # times as fast: it takes fewer steps to say so
FADED = 0.1  # what counts of a throughput once another trial begins


class Throughput:
    """A row's committed tokens per second, over about the last `window` steps in one mode."""

    def __init__(self, window: int) -> None:
        self.steps = self._tokens = self._seconds = 0.0
        self._window = window

    @property
    def value(self) -> float:
        """Tokens per second; 0 if none is known."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self._seconds / max(1.0, self.steps)

    @property
    def step_tokens(self) -> float:
        """Mean tokens of a step."""
        return self._tokens / max(1.0, self.steps)

    def add(self, tokens: float, seconds: float, steps: float) -> None:
        """Take in a step, or a share of one."""
        if self.steps >= self._window:
            self.fade(1.0 - 1.0 / self._window)
        self._tokens += tokens
        self._seconds += seconds
        self.steps += steps

    def fade(self, kept: float) -> None:
        """Let what is known count less than what will be."""
        self._tokens *= kept
        self._seconds *= kept
        self.steps *= kept

    def speedup_over(self, other: Throughput) -> float:
        """Return how many times as fast as the other this mode is; 0 while it is unknown."""
        if other.value:
            return self.value / other.value
        return math.inf if self.value else 0.0


@dataclass(slots=True)
class ModeTrial:
    """A trial of a mode that is not the incumbent."""

    mode: DraftMode
    catching_up: int  # steps at the most until the proposer has
    compared: float = 0.0  # steps
    lost_steps: float = 0.0  # worth of the incumbent's steps


class ModeTrials:
    """Compares `modes` for one size of batch and kind of texts, beginning with `incumbent`."""

    def __init__(
        self,
        first_interval: int = INTERVAL,
        *,
        modes: Sequence[DraftMode] = (DraftMode.OFF, DraftMode.ON_DEMAND),
        incumbent: DraftMode = DraftMode.ON_DEMAND,
        trial_steps: int = TRIAL_STEPS,
    ) -> None:
        self.incumbent = incumbent
        self.decided = False  # by a trial
        self._modes = tuple(modes)  # in the order in which they are tried
        self._trial_steps = trial_steps
        self._throughputs = {mode: self._unknown() for mode in modes}
        self._trial: ModeTrial | None = None
        self._last_tried = incumbent
        self._may_lose = FIRST_LOSS
        self._first_interval = self._interval = first_interval
        self._since_trial = self._wait_steps = 0.0
        self.settle()

    def take_over(self, before: ModeTrials) -> None:
        """Go on from trials with other texts: what no drafts bring hardly depends on them.

        If nothing is drafted now, the mode that drafted is tried first: its proposer catches up.
        """
        self.decided |= before.decided
        self._throughputs[DraftMode.OFF] = deepcopy(before._throughputs[DraftMode.OFF])
        if self._trial is not None:
            self._trial, self._since_trial = None, 0.0
        if self.incumbent.drafts and not before.incumbent.drafts:
            mode, self.incumbent = self.incumbent, DraftMode.OFF
            self._begin(mode)
        else:
            self.settle()

    @property
    def mode(self) -> DraftMode:
        """How drafts are to be made now."""
        return self.incumbent if self._trial is None else self._trial.mode

    @property
    def catching_up(self) -> bool:
        """Whether a proposer processes prompts: rows draft, but wait for nothing."""
        return self._trial is not None and self._trial.catching_up > 0

    @property
    def beginning(self) -> bool:
        """Whether drafts are on trial, and it is not known yet what they take."""
        return self._trial is not None and self.mode.drafts and not self.settled

    @property
    def settled(self) -> bool:
        """Whether nothing changed lately."""
        return self._settling <= 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step without its prompts; 0 if none was measured."""
        current = self._throughputs[self.mode]
        return (current if current.steps else self._best).step_s

    @property
    def _best(self) -> Throughput:
        return self._throughputs[self.incumbent]

    def settle(self) -> None:
        """Compare none of the next steps: something changed."""
        in_trial = self._trial is not None and self.mode.drafts
        self._settling = float(SETTLING_DRAFTS if in_trial else SETTLING_STEPS)

    def observe(
        self,
        tokens: float,
        seconds: float,
        *,
        drafted: float,
        rounds: float = 1.0,
        answered: float = 1.0,
    ) -> None:
        """Take in a step by its tokens per row, and the time since the step before.

        Of all rows the share `rounds` took part, `drafted` verified a draft, and `answered` have
        heard of a proposer. While the incumbent drafts, steps without any draft bring no trial
        nearer: perhaps no proposer is there.
        """
        trial, current, best = self._trial, self._throughputs[self.mode], self._best
        steps = rounds if drafted or trial is not None or not self.mode.drafts else 0.0
        typical_s = max(current.step_s, best.step_s)
        if typical_s and rounds:
            seconds = min(seconds, LONGEST_STEP * typical_s)
        if trial is not None and best.value:
            trial.lost_steps += (seconds - tokens / best.value) / best.step_s
        if trial is not None and trial.lost_steps > self._may_lose:
            self._may_lose = min(2 * self._may_lose, LARGEST_LOSS)
            self._end(trial, won=False)
        elif trial is not None and trial.catching_up:
            trial.catching_up = 0 if answered >= CAUGHT_UP else trial.catching_up - 1
            if not trial.catching_up and answered < CAUGHT_UP:
                self._end(trial, won=False)
        elif not self.settled:
            self._settling -= max(drafted, LEAST_DRAFTED) if self.mode.drafts else rounds
        else:
            current.add(tokens, seconds, steps)
            if trial is None:
                self._since_trial += steps
                self._look_for_a_better_mode()
            else:
                trial.compared += steps
                self._judge(trial)

    def _look_for_a_better_mode(self) -> None:
        """Try another mode if the incumbent fell behind it, or if the interval has passed."""
        best, others = self._best, [mode for mode in self._modes if mode is not self.incumbent]
        if 4 * best.steps < self._trial_steps:
            return
        likely = max(others, key=lambda mode: self._throughputs[mode].value)
        margin = FELL_BEHIND if best.steps >= self._trial_steps else CLEARLY
        if best.value and self._throughputs[likely].value > margin * best.value:
            self._begin(likely)
        elif self._since_trial >= max(self._interval, self._wait_steps):
            last = self._modes.index(self._last_tried)
            in_turn = (*self._modes[last + 1 :], *self._modes)
            self._begin(next(mode for mode in in_turn if mode is not self.incumbent))

    def _unknown(self) -> Throughput:
        # The more rows, the fewer steps say as much, and the longer each takes.
        return Throughput(min(INTERVAL, 3 * self._trial_steps))

    def _begin(self, mode: DraftMode) -> None:
        self._trial = ModeTrial(mode, catching_up=0 if self.incumbent.drafts else LONGEST_CATCH_UP)
        self._last_tried = mode
        self._throughputs[mode].fade(FADED)
        self.settle()

    def _judge(self, trial: ModeTrial) -> None:
        tried, drafts = self._throughputs[trial.mode], trial.mode.drafts
        speedup = tried.speedup_over(self._best) / (WORTH if drafts else 1 / WORTH)
        # Two modes that draft may differ by little, and by the luck of their texts.
        close = drafts and self.incumbent.drafts and 1 / FELL_BEHIND < speedup < FELL_BEHIND
        num_steps = INTERVAL if close else self._trial_steps
        luck = math.sqrt(FEW_STEPS / TRIAL_STEPS * self._trial_steps / max(1.0, trial.compared))
        hopeless = speedup < 1.0 - (1.0 - HOPELESS) * luck and trial.compared >= FEW_STEPS
        if trial.compared >= num_steps or (hopeless and self.incumbent.drafts):
            # Drafts shorten no step: where they bring no tokens, less time was luck.
            self._end(trial, won=speedup > 1.0 and not (drafts and tried.step_tokens < WORTH))

    def _end(self, trial: ModeTrial, *, won: bool) -> None:
        self._trial, self._since_trial, self.decided = None, 0.0, True
        tried, lost_steps = self._throughputs[trial.mode], trial.lost_steps
        if won:  # a trial of the mode before would lose what this one gained
            lost_steps *= -self._best.step_s / tried.step_s
            self._last_tried, self.incumbent = self.incumbent, trial.mode
            self._interval = self._first_interval  # it may have been luck
        else:
            self._interval = min(max(INTERVAL, 2 * self._interval), LONGEST_INTERVAL)
            if tried.speedup_over(self._best) > 1.0:
                self._throughputs[trial.mode] = self._unknown()  # it was luck, or is of long ago
            self.settle()
        self._wait_steps = lost_steps / MOST_LOST
