"""Stop strings: find the first one in text that comes in pieces, across any boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Finds the stop string that is completed first; of several ending there, the longest."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings), "an empty stop string matches everywhere"
        self._stops = stop_strings
        self._tail = ""  # the longest end of the text that may begin a stop string
        self.found: str | None = None

    def feed(self, piece: str) -> int | None:
        """Return how many characters before the end of what was fed so far a match begins.

        None if there is none. After a match nothing more may be fed; what follows the match in
        `piece` counts among the characters returned.
        """
        if not self._stops:  # most requests have none
            return None
        text = self._tail + piece
        ends = {stop: at + len(stop) for stop in self._stops if (at := text.find(stop)) >= 0}
        if ends:
            self.found = min(ends, key=lambda stop: (ends[stop], -len(stop)))
            return len(text) - ends[self.found] + len(self.found)
        self._tail = text[len(text) - begun(self._stops, text) :]
        return None

    @property
    def pending(self) -> int:
        """Length of the longest end of the text that may begin a stop string."""
        return len(self._tail)


def begun(markers: Sequence[str], text: str, start: int = 0) -> int:
    """Return how many characters at the end of the text, from `start` on, may begin a marker."""
    longest = 0
    for marker in markers:
        most = min(len(marker) - 1, len(text) - start)
        tail = text[len(text) - most :]
        at = tail.find(marker[0])
        while at >= 0 and not marker.startswith(tail[at:]):
            at = tail.find(marker[0], at + 1)
        longest = max(longest, most - at if at >= 0 else 0)
    return longest
