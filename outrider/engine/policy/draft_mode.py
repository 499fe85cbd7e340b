"""How drafts are made: never, on demand, or ahead."""

from __future__ import annotations

import enum

SAMPLED_TEMPERATURE = 0.5  # from which drafts meet a text clearly less
ALL_SIZES = frozenset(range(1, 17))  # bit lengths of numbers of rows


class DraftMode(enum.Enum):
    """How rows come to their drafts."""

    OFF = "none"
    ON_DEMAND = "on demand"  # each round's draft is made when the round before has ended
    AHEAD = "ahead"  # and guessed while that is verified, by proposers that can

    @property
    def drafts(self) -> bool:
        return self is not DraftMode.OFF
