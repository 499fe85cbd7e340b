"""The ways to come to drafts, and how far a trial of one has come: see contest.py."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

TRIAL_STEPS = 16  # to compare at least: many rows differ little by luck, few rows need more
HOPELESS = 0.8  # of the rate that a trial needs: one that goes so badly ends early
HOPELESS_AFTER = 3  # of `TRIAL_STEPS`


class DraftMode(enum.Enum):
    """In which rows come to their drafts."""

    NONE = "none"
    ON_DEMAND = "on demand"  # each round's draft is made when the round before has ended
    AHEAD = "ahead"  # and guessed while that is verified, by proposers that can

    @property
    def drafts(self) -> bool:
        return self is not DraftMode.NONE


@dataclass(slots=True)
class ModeTrial:
    """Of a way that is not the champion."""

    way: DraftMode
    catches_up: bool
    """Nothing was drafted before: at first rows wait for nothing, and it goes on as long as drafts
    get better, which come to be at hand one after the other."""
    num_steps: int  # to compare
    usual_steps: int  # of a trial with so many rows: their luck fades as the root of these
    following: int = 0  # steps at the most until a proposer has caught up
    compared: float = 0.0  # steps
    rate_before: float | None = None  # when so many were compared before
    _uncontended: float = 0.0  # of those that are compared without newcomers

    def count(self, steps: float, *, newcomers: bool) -> None:
        """So much of a step is compared."""
        self.compared += steps
        self._uncontended += steps * (not newcomers)

    def go_on(self, rate: float) -> None:
        """Drafts got better: as many steps again are compared."""
        self.rate_before, self.compared, self._uncontended = rate, 0.0, 0.0

    def hopeless(self, ratio: float) -> bool:
        """Whether what is missing, with so much of the rate that is needed, is more than luck."""
        if (self.catches_up and self.rate_before is None) or self._uncontended < HOPELESS_AFTER:
            return False
        luck = math.sqrt(HOPELESS_AFTER / self._uncontended * self.usual_steps / TRIAL_STEPS)
        return ratio < 1.0 - (1.0 - HOPELESS) * luck
