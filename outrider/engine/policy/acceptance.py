"""How likely a drafted token is accepted: of a row, and of the rows that a proposer drafts for."""

from __future__ import annotations

from outrider.engine.policy.timing import remember
from outrider.engine.rounds import Drafting, Round

PRIOR_SUCCESSES, PRIOR_TRIALS = 4.0, 5.0  # of a proposer that nobody has seen: worth a try
ALMOST_SURE = 1.0 - 1e-9  # the chance of a token that counts as sure; a series of 1 has no sum
FADE = 0.9  # per round, of what is known about a row's acceptance
PROPOSER_FADE = 0.98  # and about a proposer's, over all its rows or those of a kind
FORGETTING = 1 / 16  # per round without a draft, of what tells a row from its proposer's others


def accepted(acceptance: float, depth: float) -> float:
    """Draft tokens expected to be accepted of so many after one another: a + a^2 + ... + a^n."""
    a = acceptance if acceptance < ALMOST_SURE else ALMOST_SURE
    gain: float = a * (1.0 - a**depth) / (1.0 - a)
    return gain


def expected_gain(d: Drafting) -> float:
    """Draft tokens of a row's round that are expected to be accepted."""
    return accepted(d.successes / d.trials, d.num_draft_tokens * d.levels)


class Acceptance:
    """Fading successes and trials, by proposer here, by row in its `Drafting`.

    A proposer's are kept of all its rows, and of the warm ones and the others apart: what one kind
    showed would keep rows of the other from being drafted for, which alone could tell.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool | None], list[float]] = {}
        """Successes and trials by proposer and whether its rows are warm; None: all of them."""

    def __len__(self) -> int:
        return len(self._known)

    def of_proposer(self, d: Drafting) -> float | None:
        """The mean over all rows of a row's proposer; None if nothing is known of it."""
        known = self._known.get((d.proposer_id or "", None))
        return None if known is None else known[0] / known[1]

    def begin(self, d: Drafting) -> None:
        """Of a row nothing is known yet."""
        d.successes, d.trials = PRIOR_SUCCESSES, PRIOR_TRIALS

    def join(self, d: Drafting, proposer_id: str) -> None:
        """With a proposer that is known a row begins as its others of the kind on average."""
        for rows in ((proposer_id, None), (proposer_id, d.warm)):
            if (known := self._known.get(rows)) is not None:
                remember(self._known, rows, known)  # it is among the latest
        if known is not None:
            successes, trials = known
            d.successes, d.trials = PRIOR_TRIALS * successes / trials, PRIOR_TRIALS

    def observe(self, d: Drafting, round_: Round) -> None:
        """A row's round verified tokens, perhaps none."""
        name = d.proposer_id or ""
        if not round_.drafted:  # what is known of the row grows old: more and more its proposer's
            successes, trials = self._known.get((name, d.warm), (d.successes, d.trials))
            d.successes += (PRIOR_TRIALS * successes / trials - d.successes) * FORGETTING
            d.trials += (PRIOR_TRIALS - d.trials) * FORGETTING
            return
        d.successes = FADE * d.successes + round_.accepted
        d.trials = FADE * d.trials + round_.tried
        d.levels += (round_.depth / round_.drafted - d.levels) * (1 - FADE)
        for rows in ((name, None), (name, d.warm)):
            known = self._known.get(rows)
            if known is None:
                known = [PRIOR_SUCCESSES, PRIOR_TRIALS]
                remember(self._known, rows, known)
            known[0] = PROPOSER_FADE * known[0] + round_.accepted
            known[1] = PROPOSER_FADE * known[1] + round_.tried
