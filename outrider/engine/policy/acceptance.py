"""How likely a drafted token is accepted, and how often a proposer has a draft at all.

Both are moving averages by row and by proposer. A row begins with its proposer's average.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.policy.timing import remember
from outrider.engine.rounds import Round

PRIOR_SUCCESSES, PRIOR_TRIALS = 4.0, 5.0  # of an unknown proposer: it is worth a try
ALMOST_SURE = 1.0 - 1e-9  # a geometric series of 1 has no sum
ROW_FADE, PROPOSER_FADE = 0.9, 0.98  # kept per round of what is known
FORGETTING = 1 / 16  # per round without a draft, by which a row's average becomes its proposer's
EXPLORING = 1 / 64  # per round that wanted no draft, by which it becomes the prior: for a new try
ANSWER_FADE = 0.85  # kept per answer of what is known of a row's answers
ALWAYS = 0.999  # a share of answers with a draft that needs no further counting


def expected_accepted(acceptance: float, depth: float) -> float:
    """Return how many of `depth` draft tokens in a chain are accepted: a + a^2 + ... + a^n."""
    a = acceptance if acceptance < ALMOST_SURE else ALMOST_SURE
    gain: float = a * (1.0 - a**depth) / (1.0 - a)
    return gain


@dataclass(slots=True)
class RowAcceptance:
    """A row's fading counts of draft tokens that were accepted, and of those that were tried."""

    successes: float = PRIOR_SUCCESSES
    trials: float = PRIOR_TRIALS
    levels: float = 1.0  # depth of a draft per token of it; 1 for a chain

    @property
    def rate(self) -> float:
        return self.successes / self.trials

    def expected_accepted(self, num_draft_tokens: int) -> float:
        """Return how many tokens of a draft are expected to be accepted."""
        return expected_accepted(self.rate, num_draft_tokens * self.levels)

    def restart(self, rate: float) -> None:
        """Begin anew at the rate of others."""
        self.successes, self.trials = PRIOR_TRIALS * rate, PRIOR_TRIALS

    def observe(self, round_: Round) -> None:
        """Take in a round that verified a draft."""
        self.successes = ROW_FADE * self.successes + round_.accepted
        self.trials = ROW_FADE * self.trials + round_.tried
        self.levels += (round_.depth / round_.drafted - self.levels) * (1 - ROW_FADE)

    def approach(self, rate: float, share: float) -> None:
        """Move by a share of the way to another rate."""
        self.successes += (PRIOR_TRIALS * rate - self.successes) * share
        self.trials += (PRIOR_TRIALS - self.trials) * share


class Acceptance:
    """The acceptance of proposers, over all their rows and over those of one kind.

    Sampled rows and greedy ones are two kinds. What one kind showed would keep rows of the other
    from being drafted for.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool | None], list[float]] = {}
        """Successes and trials by proposer and kind; None means all of its rows."""

    def __len__(self) -> int:
        return len(self._known)

    def of_proposer(self, proposer_id: str, *, sampled: bool | None = None) -> float | None:
        """Return a proposer's acceptance rate; None if it is unknown."""
        known = self._known.get((proposer_id, sampled))
        return None if known is None else known[0] / known[1]

    def join(self, row: RowAcceptance, proposer_id: str, *, sampled: bool) -> None:
        """Begin a row with the average of its proposer's other rows of its kind."""
        for key in ((proposer_id, None), (proposer_id, sampled)):
            if (known := self._known.get(key)) is not None:
                remember(self._known, key, known)  # it stays among the latest
        if (rate := self.of_proposer(proposer_id, sampled=sampled)) is not None:
            row.restart(rate)

    def observe(self, row: RowAcceptance, proposer_id: str, round_: Round, *, sampled: bool) -> None:
        """Take in a row's round that verified a draft."""
        row.observe(round_)
        for key in ((proposer_id, None), (proposer_id, sampled)):
            known = self._known.get(key)
            if known is None:
                known = [PRIOR_SUCCESSES, PRIOR_TRIALS]
                remember(self._known, key, known)
            known[0] = PROPOSER_FADE * known[0] + round_.accepted
            known[1] = PROPOSER_FADE * known[1] + round_.tried

    def observe_undrafted(
        self, row: RowAcceptance, proposer_id: str, *, sampled: bool, wanted: bool
    ) -> None:
        """Let what is known of a row grow old in a round that verified no draft.

        Where none was `wanted` the row comes back to the prior, so that it tries again in the end.
        """
        if not wanted:
            row.approach(PRIOR_SUCCESSES / PRIOR_TRIALS, EXPLORING)
            return
        rate = self.of_proposer(proposer_id, sampled=sampled)
        row.approach(row.rate if rate is None else rate, FORGETTING)


@dataclass(slots=True)
class AnswerRate:
    """How often a row's proposer has a draft, and what its answers take when it has none."""

    share: float = 1.0  # of answers that hold a draft
    empty_s: float = 0.0  # mean seconds from a commit to an answer without one
    worth_waiting: bool = True

    def set_worth_waiting(self, gain_s: float, *, own_device: bool) -> None:
        """Decide whether a row is to wait for answers of which one with a draft gains `gain_s`.

        On a device that both share the row waits: the search would slow down a step beside it.
        """
        lost_s = (1.0 - self.share) * self.empty_s
        self.worth_waiting = not own_device or self.share * gain_s >= lost_s


class DraftAvailability:
    """The share of a proposer's answers that hold a draft, over all its rows."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}
        """The share, and the seconds that an answer without a draft took last."""

    def join(self, row: AnswerRate, proposer_id: str) -> None:
        """Begin a row with the average of its proposer's other rows."""
        row.worth_waiting = True
        row.share, row.empty_s = self._known.get(proposer_id, (1.0, 0.0))

    def observe(self, row: AnswerRate, proposer_id: str, seconds: float, *, drafted: bool) -> None:
        """Take in an answer, so long after a commit for which no draft was left."""
        row.worth_waiting |= drafted  # however late: whether waiting pays is decided again
        if drafted and row.share > ALWAYS:  # as with every draft model, row and round
            return
        row.share += (drafted - row.share) * (1 - ANSWER_FADE)
        share, empty_s = self._known.get(proposer_id, (1.0, 0.0))
        if not drafted:
            row.empty_s += (seconds - row.empty_s) * (1 - ANSWER_FADE if row.empty_s else 1.0)
            empty_s = row.empty_s
        share += (drafted - share) * (1 - PROPOSER_FADE)
        remember(self._known, proposer_id, (share, empty_s))
