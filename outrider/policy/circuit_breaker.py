"""Stop to wait for a proposer whose drafts a row awaited in vain."""

from __future__ import annotations

from dataclasses import dataclass

MISSES_ALLOWED = 3  # rounds in a row: one late draft says little
FIRST_OPEN_ROUNDS = 16  # doubles while silent: few waits in a text, and any draft ends it


@dataclass(slots=True)
class CircuitBreaker:
    """Open for some rounds after misses in a row; one more miss then opens it for longer."""

    deadline_misses: int = 0
    rounds_left: int = 0  # while it is open
    last_open_rounds: int = 0

    def close(self, *, verified: bool = False) -> None:
        """Wait for drafts again: one came. If one was `verified` the proposer has recovered."""
        self.deadline_misses = self.rounds_left = 0
        if verified:
            self.last_open_rounds = 0

    def missed(self) -> bool:
        """Note a draft that was awaited in vain. Return whether the breaker opens."""
        self.deadline_misses += 1
        if self.deadline_misses < (1 if self.last_open_rounds else MISSES_ALLOWED):
            return False
        self.deadline_misses = 0
        self.rounds_left = self.last_open_rounds = 2 * self.last_open_rounds or FIRST_OPEN_ROUNDS
        return True
