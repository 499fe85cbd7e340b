"""Whether drafting pays at all, found out by doing without it for a moment.

Step times by size say what verifying costs, and delays what waiting costs. Neither says what
drafting costs the steps beside it, where proposer and scorer share cores, a GPU or the bandwidth
of a memory: every step is measured with drafts being made next to it. So both ways are timed:
committed tokens per second of all rows together, with drafts and without. The better one goes on,
and the other is tried again for a few steps, at distances that double as long as nothing changes,
and at which all trials together lose no more than `MOST_LOST` of the time. The first trial may not
lose much; after one that could not be ended for that, the next may lose more.

Steps are counted by rounds, the share of all rows that take part: a step of 4 rows of 32 is an
eighth of one. A proposer that was not asked for a while first processes the rows' prompts: they go
on meanwhile and wait for nothing, and nothing is compared until it has answered most of them and
each could have drafted a few times. A trial of drafts goes on as long as they get better. One step
that takes many times as long as others (a kernel is compiled, memory is mapped) counts little.
"""

from __future__ import annotations

WORTH = 1.03  # times the rate without drafts: for less none are made
TRIAL_STEPS = 16  # and up to `STRETCH` of few rows, whose luck differs more
SETTLING_STEPS = 3  # after a change: drafts of before are used up
SETTLING_DRAFTS = 8  # of each row: until then it is not known what drafts take
LONGEST_SETTLING = 128  # steps until so many drafts a row have come at the latest
FOLLOWED = 0.75  # of the rows: a proposer that has answered so many has caught up
LONGEST_FOLLOWING = 512  # steps until then at the latest
LONGEST_STEP = 4.0  # times the mean
STRETCH, LONGEST_STRETCH = 128, 4096  # steps between two trials; doubles while nothing changes
MOST_LOST = 0.01  # of the time, by trials of the worse way
FIRST_LOSS, LARGEST_LOSS = 32, 256  # steps' worth that one trial may lose; doubles in between
FELL_BEHIND = 1.05  # times as much: what the other way brought when it was last tried
HOPELESS = 0.8  # of the other way's rate: a trial that goes so badly ends early
HOPELESS_AFTER = 3  # steps
FADED = 0.1  # what counts of a rate once another trial, or part of one, begins


class Rate:
    """A row's tokens per second over about the last `STRETCH` steps."""

    def __init__(self) -> None:
        self.steps = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: float, seconds: float, counts: float) -> None:
        """One step's tokens, all the time since the step before, how much of a step it was."""
        if self.steps >= STRETCH:
            self.fade(1.0 - 1.0 / STRETCH)
        self._tokens += tokens
        self._seconds += seconds
        self.steps += counts

    def fade(self, kept: float) -> None:
        """What is known counts less than what will be."""
        self._tokens *= kept
        self._seconds *= kept
        self.steps *= kept

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self._seconds / max(1.0, self.steps)

    @property
    def length(self) -> float:
        """Mean tokens of a step."""
        return self._tokens / max(1.0, self.steps)


class Contest:
    """Drafts against no drafts, at one size of batch. The first trial is after `first_stretch`.

    It begins with `champion`: drafting or not. A trial compares `trial_steps`.
    """

    def __init__(
        self,
        first_stretch: int = STRETCH,
        *,
        champion: bool = True,
        trial_steps: int = TRIAL_STEPS,
    ) -> None:
        self.champion = champion  # what was better so far
        self.decided = False  # by a trial
        self._trial_steps = trial_steps
        self._on_trial = False
        self._trial_drafted = False  # the present trial has begun to draft
        self._following = 0  # steps at the most
        self._steps_left = 0.0  # to compare in the present trial
        self._best = Rate()  # the champion's
        self._tried = Rate()  # the other's, in its trials
        self._tried_before: float | None = None  # its rate, earlier in the present trial
        self._may_lose = FIRST_LOSS
        self._lost_steps = 0.0  # by the last trial
        self._lost_since = 0.0  # by the champion since it was on trial, if the other is better
        self._first_stretch = self._stretch = first_stretch  # steps until the next trial at least
        self._since_trial = 0.0
        self.settle()

    @property
    def drafting(self) -> bool:
        """Whether rows are to draft now."""
        return self.champion != self._on_trial

    @property
    def following(self) -> bool:
        """Whether a proposer is catching up: rows are to draft, but to wait for nothing."""
        return self._following > 0

    @property
    def beginning(self) -> bool:
        """Whether drafts are on trial, and what they take is not known yet."""
        return self._on_trial and self.drafting and not self.settled

    @property
    def settled(self) -> bool:
        """Whether nothing changed lately."""
        return self._settling <= 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step without its prompts; 0 if none was measured."""
        return (self._tried if self._on_trial and self._tried.steps else self._best).step_s

    def settle(self) -> None:
        """Something else changed: the next steps say nothing."""
        drafts = self._on_trial and self.drafting
        self._settling = float(SETTLING_DRAFTS if drafts else SETTLING_STEPS)
        self._unsettled_steps = 0

    def observe(
        self,
        tokens: float,
        seconds: float,
        *,
        drafted: float,
        rounds: float = 1.0,
        followed: float = 1.0,
    ) -> None:
        """A step: tokens per row, and the time since the step before, less that for prompts.

        Of all rows the share `rounds` took part, and the share `drafted` verified a draft; a
        proposer has answered the share `followed`.

        While rows are to draft, steps without any draft do not bring the end of a stretch or trial
        nearer: no proposer may be there, and then there is nothing to decide. But once a trial had
        a draft, steps for which the policy wants none are part of how drafting goes.
        """
        self._trial_drafted |= drafted > 0 and self._on_trial
        counts = rounds if drafted or not self.drafting or self._trial_drafted else 0.0
        current, best = (self._tried if self._on_trial else self._best), self._best
        typical_s = max(current.step_s, best.step_s)
        if typical_s and rounds:
            seconds = min(seconds, LONGEST_STEP * typical_s)
        if best.value and (self._on_trial or not self.settled):
            self._lost_steps += (seconds - tokens / best.value) / best.step_s
        if self._tried.value and not self._on_trial:
            self._lost_since += (seconds - tokens / self._tried.value) / self._tried.step_s
        if self._on_trial and self._lost_steps > self._may_lose:
            self._may_lose = min(2 * self._may_lose, LARGEST_LOSS)
            self._end_trial(won=False)
        elif self._following:
            self._following -= 1
            if followed >= FOLLOWED:
                self._following = 0
            elif not self._following:
                self._end_trial(won=False)
        elif not self.settled:
            self._settling -= drafted if self.drafting else rounds
            self._unsettled_steps += counts > 0
            if self._unsettled_steps == LONGEST_SETTLING:
                self._settling = 0.0
        else:
            current.add(tokens, seconds, counts)
            if self._on_trial:
                self._steps_left -= counts
                self._judge()
            else:
                self._since_trial += counts
                self._go_on()

    def _go_on(self) -> None:
        # What was better may be so no more: other texts, or another load beside.
        fell_behind = self._tried.value > FELL_BEHIND * self._best.value > 0.0
        if fell_behind or self._since_trial >= max(self._stretch, self._lost_steps / MOST_LOST):
            self._begin_trial()

    def _begin_trial(self) -> None:
        self._on_trial, self._trial_drafted = True, False
        self._following = 0 if self.champion else LONGEST_FOLLOWING
        self._tried_before, self._lost_steps = None, 0.0
        self._compare()
        self.settle()

    def _judge(self) -> None:
        # No quotients: where all that ends a step is a stop, no token comes at all.
        tried, best = self._tried.value, self._best.value
        hopeless = tried < HOPELESS * best and not (self.drafting and self._tried_before is None)
        if self._steps_left > (self._trial_steps - HOPELESS_AFTER if hopeless else 0):
            return
        # Drafts shorten no step: where they bring no tokens, less time was luck.
        lucky = self.drafting and self._tried.length < WORTH
        won = not lucky and tried > best * (WORTH if self.drafting else 1 / WORTH)
        if self.drafting and not won and tried > WORTH * (self._tried_before or 0.0):
            self._tried_before = tried
            self._compare()
        else:
            self._end_trial(won=won)

    def _compare(self) -> None:
        self._steps_left = float(self._trial_steps)
        self._tried.fade(FADED)

    def _end_trial(self, *, won: bool) -> None:
        self._on_trial, self._since_trial, self.decided = False, 0.0, True
        self._following = 0
        if won:
            self.champion = not self.champion
            # What a verdict cost that did not hold counts as if its trial had gone on.
            self._lost_steps, self._lost_since = max(0.0, self._lost_since), self._lost_steps
            self._best, self._tried = self._tried, self._best
            self._stretch = self._first_stretch  # it may have been luck
        else:
            self._stretch = min(max(STRETCH, 2 * self._stretch), LONGEST_STRETCH)
            if self._tried.value > self._best.value:
                self._tried = Rate()  # it was luck, or is of long ago
            self.settle()
