"""How drafts are made, and what steps bring in each mode."""

from __future__ import annotations

import enum
import math

SAMPLED_TEMPERATURE = 0.5  # from which drafts meet a text clearly less
ALL_SIZES = frozenset(range(1, 17))  # bit lengths of numbers of rows


class DraftMode(enum.Enum):
    """How drafts are made: never, on demand, or ahead."""

    OFF = "none"
    ON_DEMAND = "on demand"  # each round's draft is made when the round before has ended
    AHEAD = "ahead"  # and guessed while that is verified, by proposers that can

    @property
    def drafts(self) -> bool:
        return self is not DraftMode.OFF


class Throughput:
    """A row's committed tokens per second, over about the last `window` steps in one mode."""

    def __init__(self, window: int) -> None:
        self.steps = 0.0
        self.missed_steps = 0.0
        """Steps' worth of time that the incumbent mode lost to this one since it won."""
        self._window = window
        self._tokens = self._seconds = 0.0

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

    def lost_steps(self, tokens: float, seconds: float) -> float:
        """Return by how many of its mean steps so many tokens took longer than in this mode."""
        return (seconds - tokens / self.value) / self.step_s

    def speedup_over(self, other: Throughput) -> float:
        """Return how many times as fast as the other this mode is; 0 while it is unknown."""
        if other.value:
            return self.value / other.value
        return math.inf if self.value else 0.0
