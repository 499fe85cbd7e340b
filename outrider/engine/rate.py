"""What a way to come to drafts brings: committed tokens per second of all rows, by row.

Newcomers slow drafts down, and come in waves: a trial may meet one, or none. So what steps bring
beside newcomers and without them is kept apart, and ways are compared for one share of tokens that
come beside newcomers. Without drafts there is no difference, once their prompts are taken off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BUSY_STEPS = 256  # beside newcomers that count: they come in waves, of which one says little
FEW = 4  # steps of a kind, which are not yet what such steps take


@dataclass(slots=True)
class _Steps:
    window: int
    tokens: float = 0.0
    seconds: float = 0.0
    num: float = 0.0

    def fade(self, kept: float) -> None:
        self.tokens *= kept
        self.seconds *= kept
        self.num *= kept

    @property
    def known(self) -> bool:
        return self.num >= FEW and self.tokens > 0.0 < self.seconds


class Rate:
    """A row's tokens per second over about the last `window` steps, in one way."""

    def __init__(self, window: int, *, drafts: bool) -> None:
        self.missed_steps = 0.0  # worth of them that the champion lost to this way in its reign
        self._kinds = (_Steps(window), _Steps(BUSY_STEPS)) if drafts else (_Steps(window),)

    def add(self, tokens: float, seconds: float, counts: float, *, newcomers: bool) -> None:
        """One step's tokens, all the time since the step before, how much of a step it was."""
        steps = self._kinds[-1 if newcomers else 0]
        if steps.num >= steps.window:
            steps.fade(1.0 - 1.0 / steps.window)
        steps.tokens += tokens
        steps.seconds += seconds
        steps.num += counts

    def fade(self, kept: float) -> None:
        """What is known counts less than what will be."""
        for steps in self._kinds:
            steps.fade(kept)

    def over(self, other: Rate, share: float) -> float:
        """How many times as much as the other, for a share of tokens that come beside newcomers.

        By one kind of steps alone if only that is known of both.
        """
        if not other.value:
            return math.inf if self.value else 0.0
        kinds = [i for i in (0, -1) if self._kinds[i].known and other._kinds[i].known]
        if len(kinds) == 1:
            share = float(kinds[0] == -1)
        mine = self.seconds_for(1.0, share)
        return other.seconds_for(1.0, share) / mine if mine else 0.0

    def seconds_for(self, tokens: float, share: float) -> float:
        """What so many tokens take of which that share come beside newcomers."""
        calm, busy = [
            steps.seconds / steps.tokens if steps.known else 1.0 / self.value if self.value else 0.0
            for steps in (self._kinds[0], self._kinds[-1])
        ]
        return tokens * ((1.0 - share) * calm + share * busy)

    @property
    def value(self) -> float:
        """Tokens per second of all that is known; 0 if nothing is."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def steps(self) -> float:
        """So many are known."""
        return sum([steps.num for steps in self._kinds])

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self._seconds / max(1.0, self.steps)

    @property
    def length(self) -> float:
        """Mean tokens of a step."""
        return self._tokens / max(1.0, self.steps)

    @property
    def _tokens(self) -> float:
        return sum([steps.tokens for steps in self._kinds])

    @property
    def _seconds(self) -> float:
        return sum([steps.seconds for steps in self._kinds])
