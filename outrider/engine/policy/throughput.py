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
    """Of one kind, and what they brought."""

    window: int
    tokens: float = 0.0
    seconds: float = 0.0
    num: float = 0.0
    token_s: float | None = None
    """Seconds of a token; None as long as few steps say it."""

    def add(self, tokens: float, seconds: float, counts: float) -> None:
        if self.num >= self.window:
            self.fade(1.0 - 1.0 / self.window)
        self.tokens += tokens
        self.seconds += seconds
        self.num += counts
        self._judge()

    def fade(self, kept: float) -> None:
        self.tokens *= kept
        self.seconds *= kept
        self.num *= kept
        self._judge()

    def _judge(self) -> None:
        known = self.num >= FEW and self.tokens and self.seconds
        self.token_s = self.seconds / self.tokens if known else None


class Throughput:
    """A row's tokens per second over about the last `window` steps, in one way.

    Asked several times for each step, so what there is to ask for is worked out when one is added.
    """

    def __init__(self, window: int, *, drafts: bool) -> None:
        self.missed_steps = 0.0  # worth of them that the champion lost to this way in its reign
        self.value = 0.0
        """Tokens per second of all that is known; 0 if nothing is."""
        self.steps = 0.0
        """So many are known."""
        self.step_s = 0.0
        """Mean seconds of a step."""
        self.length = 0.0
        """Mean tokens of a step."""
        self._uncontended = _Steps(window)
        self._busy = _Steps(BUSY_STEPS) if drafts else self._uncontended
        self._kinds = (self._uncontended, self._busy) if drafts else (self._uncontended,)

    def add(self, tokens: float, seconds: float, counts: float, *, newcomers: bool) -> None:
        """One step's tokens, all the time since the step before, how much of a step it was."""
        (self._busy if newcomers else self._uncontended).add(tokens, seconds, counts)
        self._sum_up()

    def fade(self, kept: float) -> None:
        """What is known counts less than what will be."""
        for steps in self._kinds:
            steps.fade(kept)
        self._sum_up()

    def _sum_up(self) -> None:
        tokens = seconds = self.steps = 0.0
        for steps in self._kinds:
            tokens += steps.tokens
            seconds += steps.seconds
            self.steps += steps.num
        self.value = tokens / seconds if seconds else 0.0
        self.step_s, self.length = (n / max(1.0, self.steps) for n in (seconds, tokens))

    def over(self, other: Throughput, share: float) -> float:
        """How many times as much as the other, for a share of tokens that come beside newcomers.

        By one kind of steps alone if only that is known of both.
        """
        if not other.value:
            return math.inf if self.value else 0.0
        if self._uncontended.token_s is None or other._uncontended.token_s is None:
            share = 1.0 if self._busy.token_s and other._busy.token_s else share
        elif self._busy.token_s is None or other._busy.token_s is None:
            share = 0.0
        mine = self.seconds_for(1.0, share)
        return other.seconds_for(1.0, share) / mine if mine else 0.0

    def seconds_for(self, tokens: float, share: float) -> float:
        """What so many tokens take of which that share come beside newcomers."""
        uncontended, busy = self._uncontended.token_s, self._busy.token_s
        if uncontended is None or busy is None:
            any_s = 1.0 / self.value if self.value else 0.0
            uncontended, busy = (
                any_s if token_s is None else token_s for token_s in (uncontended, busy)
            )
        return tokens * (uncontended + share * (busy - uncontended))
