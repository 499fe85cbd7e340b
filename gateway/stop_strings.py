"""Stop strings: find the first one in text that comes in pieces, across any boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStringMatcher:
    """Finds the stop string that is completed first; of several ending there, the longest.

    One Knuth-Morris-Pratt automaton per stop string: the work per character does not depend on
    the text so far, and how the text is cut into pieces cannot matter.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings), "an empty stop string matches everywhere"
        self._automata = [_Automaton(stop) for stop in stop_strings]
        self.found: str | None = None

    def feed(self, piece: str) -> int | None:
        """Return how many characters before the end of what was fed so far a match begins.

        None if there is none. After a match nothing more may be fed; what follows the match in
        `piece` counts among the characters returned.
        """
        if not self._automata:  # most requests have none
            return None
        for position, char in enumerate(piece):
            matched = max([automaton.step(char) for automaton in self._automata])
            if matched:
                self.found = next(
                    a.pattern for a in self._automata if a.state == matched == len(a.pattern)
                )
                return matched + len(piece) - position - 1
        return None

    @property
    def pending(self) -> int:
        """Length of the longest end of the text that may begin a stop string."""
        return max((automaton.state for automaton in self._automata), default=0)


class _Automaton:
    def __init__(self, pattern: str) -> None:
        self.state = 0  # how much of the pattern the text ends with
        self.pattern = pattern
        self._fallback = _fallbacks(pattern)

    def step(self, char: str) -> int:
        """Return the pattern's length if `char` completes it, else 0."""
        while self.state and self.pattern[self.state] != char:
            self.state = self._fallback[self.state - 1]
        if self.pattern[self.state] == char:
            self.state += 1
        return self.state if self.state == len(self.pattern) else 0


@lru_cache(maxsize=64)  # a request's choices have the same stop strings
def _fallbacks(pattern: str) -> tuple[int, ...]:
    """fallbacks[i]: length of the longest proper prefix of pattern[: i + 1] that also ends it."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return tuple(table)
