"""What a way to come to drafts brings: committed tokens per second of all rows, by row."""

from __future__ import annotations


class Rate:
    """A row's tokens per second over about the last `window` steps, in one way."""

    def __init__(self, window: int) -> None:
        self.steps = 0.0
        self.missed_steps = 0.0  # worth of them that the champion lost to this way in its reign
        self._window = window
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: float, seconds: float, counts: float) -> None:
        """One step's tokens, all the time since the step before, how much of a step it was."""
        if self.steps >= self._window:
            self.fade(1.0 - 1.0 / self._window)
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
