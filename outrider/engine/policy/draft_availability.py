"""How often a proposer has a guess at all, and what it takes it to say that it has none.

One that looks its drafts up often finds nothing. A row that waits for its answers wins what a guess
brings in some rounds, and loses the way there and back in the others.
"""

from __future__ import annotations

from outrider.engine.policy.timing import remember
from outrider.engine.rounds import Drafting

FADE = 0.85  # per answer, of what is known of a row
PROPOSER_FADE = 0.98  # and of a proposer, over all its rows
ALWAYS = 0.999  # such a share of guesses needs no more of them


class DraftAvailability:
    """The share of answers that hold a guess: by proposer here, by row in its `Drafting`."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}
        """The share, and the seconds that an answer without a guess took last."""

    def join(self, d: Drafting, proposer_id: str) -> None:
        """With a proposer that is known a row begins as its others on average."""
        d.has_guesses = True
        d.guess_share, d.no_guess_s = self._known.get(proposer_id, (1.0, 0.0))

    def observe(self, d: Drafting, seconds: float, *, guessed: bool) -> None:
        """A row's proposer answered so long after a commit for which no draft was left."""
        d.has_guesses |= guessed  # late as it may be: whether it pays to wait is asked again
        if guessed and d.guess_share > ALWAYS:  # as of every draft model, for each row and round
            return
        d.guess_share += (guessed - d.guess_share) * (1 - FADE)
        name = d.proposer_id or ""
        share, no_guess_s = self._known.get(name, (1.0, 0.0))
        if not guessed:
            d.no_guess_s += (seconds - d.no_guess_s) * (1 - FADE if d.no_guess_s else 1.0)
            no_guess_s = d.no_guess_s
        share += (guessed - share) * (1 - PROPOSER_FADE)
        remember(self._known, name, (share, no_guess_s))


def worth_asking(d: Drafting, gain_s: float) -> bool:
    """Whether a row is to wait for its proposer's answers, of which one with a guess brings it
    forward by `gain_s`: g * gain_s >= (1 - g) * e, with `g` the share of guesses and `e` the
    seconds that another answer takes.

    On a device that both share it waits: the way is short, and beside a step the search would take
    from the step what it takes before one.
    """
    lost_s = (1.0 - d.guess_share) * d.no_guess_s
    return not d.own_device or d.guess_share * gain_s >= lost_s
