"""Whether drafting pays at all, found out by doing without it for a moment.

Step times by size say what verifying costs, and delays what waiting costs. Neither says what
drafting costs the steps beside it, where proposer and scorer share cores, a GPU or the bandwidth
of a memory: every step is measured with drafts being made next to it. So both ways are timed:
committed tokens per second of all rows together, with drafts and without. The better one goes on,
and the other is tried again for a few steps, at distances that double as long as nothing changes,
and grow faster while trials would take more than a small share of the time between them.

Steps are counted by rounds, the share of all rows that take part: a step of 4 rows of 32 is an
eighth of one. After a change nothing is compared until every row could have drafted a few times: a
proposer that was not asked for a while first processes prompts, and the rows go on meanwhile. One
step that takes many times as long as others (a kernel is compiled, memory is mapped) counts little.
"""

from __future__ import annotations

from outrider.engine.measured import StepDone

TRIAL_STEPS = 16
SETTLING_STEPS = 3  # after a change: drafts of before are used up, or the first new ones come
LONGEST_SETTLING = 32  # steps until so many drafts a row have come at the latest
LONGEST_STEP = 4.0  # times the mean
FIRST_STRETCH, LONGEST_STRETCH = 128, 4096  # steps of one row between two trials
SHORTEST_STRETCH = 8  # of many rows: one step of theirs says as much as several of one row
MOST_LOST = 0.01  # of the time, by trials of the worse way
FASTEST_GROWTH = 8  # of a stretch: what was measured in few steps may have been an accident
CLEARLY = 1.05  # times better, or it is noise
HOPELESS = 0.8  # of the other way's rate: a trial that goes so badly ends early
HOPELESS_AFTER = 3  # steps


class Rate:
    """Tokens per second over about the last `FIRST_STRETCH` steps."""

    def __init__(self) -> None:
        self.steps = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float, counts: float) -> None:
        """One step's tokens, all the time since the step before, how much of a step it was."""
        if self.steps >= FIRST_STRETCH:
            self._tokens -= self._tokens / FIRST_STRETCH
            self._seconds -= self._seconds / FIRST_STRETCH
        self._tokens += tokens
        self._seconds += seconds
        self.steps += counts

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self._seconds / max(1.0, min(self.steps, FIRST_STRETCH))


class Contest:
    """Drafts against no drafts, at one size of batch. The first trial is after `first_stretch`.

    It begins with `champion`: drafting or not.
    """

    def __init__(self, first_stretch: int = FIRST_STRETCH, *, champion: bool = True) -> None:
        self._first_stretch = first_stretch
        self.champion = champion  # what was better so far
        self._on_trial = False
        self._trial_drafted = False  # the present trial has begun to draft
        self._best = Rate()  # the champion's
        self._tried = Rate()  # the other's, in the present trial
        self._other = 0.0  # tokens per second of the other, when it was last measured
        self._stretch = first_stretch
        self._since_trial = 0.0
        self.settle()

    @property
    def drafting(self) -> bool:
        """Whether rows are to draft now."""
        return self.champion != self._on_trial

    def settle(self) -> None:
        """Something else changed: the next steps say nothing."""
        self._settling, self._unsettled_steps = float(SETTLING_STEPS), 0

    def observe(self, tokens: int, seconds: float, *, drafted: float, rounds: float = 1.0) -> None:
        """A step without prompts: what it committed, and the time since the step before.

        Of all rows the share `rounds` took part, and the share `drafted` verified a draft.

        While rows are to draft, steps without any draft do not bring the end of a stretch or trial
        nearer: no proposer may be there, and then there is nothing to decide. But once a trial had
        a draft, steps for which the policy wants none are part of how drafting goes.
        """
        self._trial_drafted |= drafted > 0 and self._on_trial
        counts = rounds if drafted or not self.drafting or self._trial_drafted else 0.0
        if self._settling > 0:
            self._settling -= drafted if self.drafting else rounds
            self._unsettled_steps += counts > 0
            if self._unsettled_steps == LONGEST_SETTLING:
                self._settling = 0.0
            return
        current = self._tried if self._on_trial else self._best
        typical_s = max(current.step_s, self._best.step_s)
        if typical_s and rounds:
            seconds = min(seconds, LONGEST_STEP * typical_s)
        current.add(tokens, seconds, counts)
        if not self._on_trial:
            self._since_trial += counts
            # What was better may be so no more: other texts, or another load beside.
            fell_behind = self._other > CLEARLY * self._best.value > 0.0
            if self._since_trial >= self._stretch or fell_behind:
                self._begin_trial()
            return
        # No quotients: where all that ends a step is a stop, no token comes at all.
        steps, tried, best = self._tried.steps, self._tried.value, self._best.value
        if steps >= TRIAL_STEPS or (steps >= HOPELESS_AFTER and tried < HOPELESS * best):
            self._end_trial(won=tried > CLEARLY * best)

    def _begin_trial(self) -> None:
        self._on_trial, self._trial_drafted, self._tried = True, False, Rate()
        self.settle()

    def _end_trial(self, *, won: bool) -> None:
        self._on_trial, self._trial_drafted, self._since_trial = False, False, 0.0
        loser, stretch = self._tried, 2 * self._stretch
        if won:
            loser, stretch = self._best, self._first_stretch
            self.champion, self._best = not self.champion, self._tried
        else:
            self.settle()
        self._other = loser.value
        longest = min(FASTEST_GROWTH * self._stretch, LONGEST_STRETCH)
        self._stretch = min(max(stretch, _affordable(self._best, loser)), longest)


def _affordable(better: Rate, worse: Rate) -> int:
    """Steps between two trials of the worse way of which all together lose `MOST_LOST`."""
    if not better.value:
        return 0
    share = worse.value / better.value
    steps = SETTLING_STEPS + (HOPELESS_AFTER if share < HOPELESS else TRIAL_STEPS)
    return round(steps * worse.step_s * (1 - share) / (MOST_LOST * better.step_s))


class Contests:
    """A contest per size of batch, by powers of two: which way is better depends on it.

    A size begins with what was better at the size before it: while answers end one by one, each
    size lasts a few steps, too few to find out anew.
    """

    def __init__(self) -> None:
        self._current = Contest(_first_stretch(1))
        self._by_size = {1: self._current}
        self._last_step_at: float | None = None

    @property
    def drafting(self) -> bool:
        """Whether rows are to draft now."""
        return self._current.drafting

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        """Numbers of rows, by their bit length, at which rows are not to draft now."""
        return frozenset(size for size, each in self._by_size.items() if not each.drafting)

    def step_done(self, step: StepDone) -> None:
        """A step ended."""
        before, self._last_step_at = self._last_step_at, step.at
        contest = self._at(step.num_running)
        if contest is not self._current:
            self._current = contest
            contest.settle()
        elif step.comparable and before is not None:
            contest.observe(
                step.tokens,
                step.at - before,
                drafted=step.drafted / step.num_running,
                rounds=step.num_rows / step.num_running,
            )

    def _at(self, num_rows: int) -> Contest:
        size = num_rows.bit_length()
        if size not in self._by_size:
            champion = self._current.champion
            self._by_size[size] = Contest(_first_stretch(size), champion=champion)
        return self._by_size[size]


def _first_stretch(size: int) -> int:
    """Steps of batches of this bit length until the first trial."""
    return max(SHORTEST_STRETCH, 2 * FIRST_STRETCH >> size)
