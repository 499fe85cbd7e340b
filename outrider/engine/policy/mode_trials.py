"""Whether to draft ahead, on demand or not at all, found out by trying each for a moment.

Step times by size say what verifying costs, and delays what waiting costs. Neither says what
drafting costs the steps beside it, where proposer and scorer share cores, a GPU or the bandwidth
of a memory: every step is measured with drafts being made next to it. Nor do they say what drafts
ahead bring many rows: some have theirs, and what is made for these delays the others'. So all ways
are timed: committed tokens per second of all rows together. The best one goes on, and the others
are tried again in turn for a few steps, at distances that double as long as nothing changes,
and at which all trials together lose no more than `MOST_LOST` of the time. The first trial may not
lose much; after one that could not be ended for that, the next may lose more. Where drafts bring
much less than after the last trial, the texts are others: what drafts brought is forgotten, and
once it is known anew, compared with what none brought, which hardly depends on texts. What steps
bring beside newcomers is kept apart (rate.py), or a trial would be lost to a wave of them.

Steps are counted by rounds, the share of all rows that take part: a step of 4 rows of 32 is an
eighth of one. A proposer that was not asked for a while first processes the rows' prompts: they go
on meanwhile and wait for nothing, and nothing is compared until it has answered most of them and
each could have drafted a few times. A trial of drafts goes on as long as they get better. One step
that takes many times as long as others (a kernel is compiled, memory is mapped) counts little.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from outrider.engine.policy.mode import HOPELESS, TRIAL_STEPS, DraftMode, ModeTrial
from outrider.engine.policy.throughput import Throughput

WORTH = 1.03  # times the rate without drafts: for less none are made; or of another way to draft
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
FALLEN = 0.85  # of what drafts brought after the last trial: the texts are others
LOAD_STEPS = 2048  # over which the share of tokens beside newcomers is taken: of many waves
FADED = 0.1  # what counts of a rate once another trial, or part of one, begins


class ModeTrials:
    """Between `ways`, for one size of batch and kind of texts.

    It begins with `incumbent`, and its first trial is after `first_stretch`. A trial compares
    `trial_steps`.
    """

    def __init__(
        self,
        first_stretch: int = STRETCH,
        *,
        ways: Sequence[DraftMode] = (DraftMode.NONE, DraftMode.ON_DEMAND),
        incumbent: DraftMode = DraftMode.ON_DEMAND,
        trial_steps: int = TRIAL_STEPS,
    ) -> None:
        self.incumbent = incumbent  # what was best so far
        self.decided = False  # by a trial
        self._ways = tuple(ways)  # in the order in which they are tried
        self._trial_steps = trial_steps
        self._rates = {way: self._unknown(way) for way in ways}
        self._came = [0.0, 0.0]  # tokens where rows draft: without newcomers, and beside them
        self._level: Throughput | None = None  # the champion's, first known since a trial or a fall
        self._trial: ModeTrial | None = None
        self._rival = incumbent  # what was on trial last
        self._has_drafted = False  # in the last trial
        self._may_lose = FIRST_LOSS
        self._lost_steps = 0.0  # by the last trial
        self._first_stretch = self._stretch = first_stretch  # steps until the next trial at least
        self._since_trial = 0.0
        self.settle()

    def take_over(self, before: ModeTrials) -> None:
        """From a contest of as many rows with other texts: what none brings hardly depends on them.

        What drafted is tried first if nothing is drafted now: its proposer has to catch up.
        """
        self.decided |= before.decided
        none = self._rates[DraftMode.NONE] = deepcopy(before._rates[DraftMode.NONE])
        none.missed_steps = 0.0
        if self._trial is not None:
            self._trial, self._since_trial = None, 0.0
        if self.incumbent.drafts and not before.incumbent.drafts:
            way, self.incumbent = self.incumbent, DraftMode.NONE
            self._begin(way)
        else:
            self.settle()

    @property
    def way(self) -> DraftMode:
        """What rows are to do now."""
        return self.incumbent if self._trial is None else self._trial.way

    @property
    def drafting(self) -> bool:
        """Whether rows are to draft now."""
        return self.way.drafts

    @property
    def following(self) -> bool:
        """Whether a proposer is catching up: rows are to draft, but to wait for nothing."""
        return self._trial is not None and self._trial.following > 0

    @property
    def beginning(self) -> bool:
        """Whether drafts are on trial, and what they take is not known yet."""
        return self._trial is not None and self.drafting and not self.settled

    @property
    def settled(self) -> bool:
        """Whether nothing changed lately."""
        return self._settling <= 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step without its prompts; 0 if none was measured."""
        current = self._rates[self.way]
        return (current if current.steps else self._best).step_s

    @property
    def _best(self) -> Throughput:
        return self._rates[self.incumbent]

    def settle(self) -> None:
        """Something else changed: the next steps say nothing."""
        drafts = self._trial is not None and self.drafting
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
        prompts: bool = False,
    ) -> None:
        """A step: tokens per row, and the time since the step before, less that for `prompts`.

        Of all rows the share `rounds` took part, and the share `drafted` verified a draft; a
        proposer has answered the share `followed`.

        While rows are to draft, steps without any draft do not bring the end of a stretch or trial
        nearer: no proposer may be there, and then there is nothing to decide. But once a trial had
        a draft, steps for which the policy wants none are part of how drafting goes.
        """
        trial, current, best = self._trial, self._rates[self.way], self._best
        self._has_drafted |= drafted > 0 and trial is not None
        counts = rounds if drafted or self._has_drafted or not self.drafting else 0.0
        typical_s = max(current.step_s, best.step_s)
        if typical_s and rounds:
            seconds = min(seconds, LONGEST_STEP * typical_s)
        newcomers = prompts or followed < FOLLOWED * rounds
        share = float(newcomers) if self.drafting else self._busy
        if best.value and (trial is not None or not self.settled):
            self._lost_steps += (seconds - best.seconds_for(tokens, share)) / best.step_s
        if trial is None:
            for rate in self._others():
                rate.missed_steps += (seconds - rate.seconds_for(tokens, share)) / rate.step_s
        if trial is not None and self._lost_steps > self._may_lose:
            self._may_lose = min(2 * self._may_lose, LARGEST_LOSS)
            self._end(trial, won=False)
        elif trial is not None and trial.following:
            trial.following = 0 if followed >= FOLLOWED else trial.following - 1
            if not trial.following and followed < FOLLOWED:
                self._end(trial, won=False)
        elif not self.settled:
            self._settling -= drafted if self.drafting else rounds
            self._unsettled_steps += counts > 0
            if self._unsettled_steps == LONGEST_SETTLING:
                self._settling = 0.0
        else:
            current.add(tokens, seconds, counts, newcomers=newcomers)
            if self.drafting:
                self._came = [n * (1.0 - counts / LOAD_STEPS) for n in self._came]
                self._came[newcomers] += tokens
            if trial is not None:
                trial.count(counts, newcomers=newcomers)
                self._judge(trial)
            else:
                self._since_trial += counts
                self._go_on()

    @property
    def _busy(self) -> float:
        """The share of tokens that come beside newcomers where rows draft."""
        return self._came[True] / (sum(self._came) or 1.0)

    def _others(self) -> list[Throughput]:
        """What is known of the ways that are not the champion."""
        best = self._best
        return [rate for rate in self._rates.values() if rate is not best and rate.value]

    def _go_on(self) -> None:
        # What was better may be so no more: other texts, or another load beside.
        best, busy = self._best, self._busy
        known = not self.decided or best.steps >= self._trial_steps  # but after a fall
        left = self._left_of_level(busy) if known and self.incumbent.drafts else 1.0
        if left < FALLEN:
            self._forget_drafts()
            return
        if not known and 4 * best.steps < self._trial_steps:
            return
        # Drafts of other ways fall with the texts, too: only none's rate still says something.
        falling = left < 1 / FELL_BEHIND
        ratio, likely = 0.0, self.incumbent
        for way, rate in self._rates.items():
            if way is self.incumbent or (falling and way.drafts):
                continue
            if (theirs := rate.over(best, busy)) > ratio:
                ratio, likely = theirs, way
        margin = FELL_BEHIND if known else 1 / HOPELESS
        if ratio > margin and best.value:
            self._begin(likely)
        elif known and self._since_trial >= max(self._stretch, self._lost_steps / MOST_LOST):
            last = self._ways.index(self._rival)
            turns = (*self._ways[last + 1 :], *self._ways)
            self._begin(next(way for way in turns if way is not self.incumbent))

    def _left_of_level(self, busy: float) -> float:
        """How many times as much drafts bring as they did when that was first known."""
        if self._level is None and self.decided:
            self._level = deepcopy(self._best)
        return 1.0 if self._level is None else self._best.over(self._level, busy)

    def _forget_drafts(self) -> None:
        """What they brought was of other texts. How long a step takes is kept."""
        for way in self._ways:
            if way.drafts and way is not self.incumbent:
                self._rates[way] = self._unknown(way)
        self._best.fade(1.0 / STRETCH)
        self._level, self._since_trial = None, 0.0

    def _unknown(self, way: DraftMode) -> Throughput:
        # The more rows, the fewer steps say as much, and the longer each takes.
        return Throughput(min(STRETCH, 3 * self._trial_steps), drafts=way.drafts)

    def _begin(self, way: DraftMode) -> None:
        catches_up = not self.incumbent.drafts
        # Two ways to draft differ by little, and by the luck of their texts as drafts and none do.
        close = way.drafts and self.incumbent.drafts
        self._trial = ModeTrial(
            way,
            catches_up,
            num_steps=STRETCH if close else self._trial_steps,
            usual_steps=self._trial_steps,
            following=LONGEST_FOLLOWING if catches_up else 0,
        )
        self._rival = way
        self._has_drafted, self._lost_steps = False, 0.0
        self._rates[way].fade(FADED)
        self.settle()

    def _judge(self, trial: ModeTrial) -> None:
        rate = self._rates[trial.way]
        tried, ratio = rate.value, rate.over(self._best, self._busy)
        needed = WORTH if self.drafting else 1 / WORTH
        if trial.compared < trial.num_steps and not trial.hopeless(ratio / needed):
            return
        # Drafts shorten no step: where they bring no tokens, less time was luck.
        won = ratio > needed and not (self.drafting and rate.length < WORTH)
        if trial.catches_up and not won and tried > WORTH * (trial.rate_before or 0.0):
            trial.go_on(tried)
            rate.fade(FADED)
        else:
            self._end(trial, won=won)

    def _end(self, trial: ModeTrial, *, won: bool) -> None:
        self._trial, self._since_trial, self.decided, self._level = None, 0.0, True, None
        if won:
            before, self.incumbent = self.incumbent, trial.way
            # What a verdict cost that did not hold counts as if its trial had gone on.
            lost, self._lost_steps = self._lost_steps, max(0.0, self._best.missed_steps)
            for way, rate in self._rates.items():
                rate.missed_steps = lost if way is before else 0.0
            self._rival = before
            self._stretch = self._first_stretch  # it may have been luck
        else:
            self._stretch = min(max(STRETCH, 2 * self._stretch), LONGEST_STRETCH)
            if self._rates[trial.way].over(self._best, self._busy) > 1.0:
                self._rates[trial.way] = self._unknown(trial.way)  # it was luck, or is of long ago
            self.settle()
