"""How likely a drafted token is accepted, and how often a proposer has a draft at all."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.policy.timing import remember
from outrider.engine.rounds import Round

PRIOR_SUCCESSES, PRIOR_TRIALS = 4.0, 5.0  # of an unknown proposer: it is worth a try
ALMOST_SURE = 1.0 - 1e-9  # a geometric series of 1 has no sum
ROW_FADE, PROPOSER_FADE = 0.9, 0.98  # kept per round of what is known
FORGETTING = 1 / 16  # per round without a draft, by which a row's rate becomes its proposer's
ANSWER_FADE = 0.85  # kept per answer of what is known of a proposer's answers


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
        """Return how many tokens of a draft are accepted: a + a^2 + ... + a^depth."""
        a = min(self.rate, ALMOST_SURE)
        gain: float = a * (1.0 - a ** (num_draft_tokens * self.levels)) / (1.0 - a)
        return gain

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
    """The acceptance of proposers, with which their rows begin.

    Sampled rows and greedy ones are apart: what one kind showed would keep rows of the other from
    being drafted for.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool], tuple[float, float]] = {}  # successes, trials

    def __len__(self) -> int:
        return len(self._known)

    def of_proposer(self, proposer_id: str | None, *, sampled: bool) -> float | None:
        """Return a proposer's acceptance rate; None if it is unknown."""
        known = self._known.get((proposer_id or "", sampled))
        return None if known is None else known[0] / known[1]

    def join(self, row: RowAcceptance, proposer_id: str, *, sampled: bool) -> None:
        """Begin a row with the rate of its proposer's other rows of its kind."""
        if (rate := self.of_proposer(proposer_id, sampled=sampled)) is not None:
            row.approach(rate, 1.0)

    def observe(
        self, row: RowAcceptance, proposer_id: str | None, round_: Round, *, sampled: bool
    ) -> None:
        """Take in a row's round that verified a draft."""
        row.observe(round_)
        key = proposer_id or "", sampled
        successes, trials = self._known.get(key, (PRIOR_SUCCESSES, PRIOR_TRIALS))
        successes = PROPOSER_FADE * successes + round_.accepted
        remember(self._known, key, (successes, PROPOSER_FADE * trials + round_.tried))

    def observe_undrafted(
        self, row: RowAcceptance, proposer_id: str | None, *, sampled: bool
    ) -> None:
        """Let what is known of a row grow old in a round that verified no draft."""
        if (rate := self.of_proposer(proposer_id, sampled=sampled)) is not None:
            row.approach(rate, FORGETTING)


class DraftAvailability:
    """How often a proposer's answer holds a draft, and what its empty answers take."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}  # share with a draft, seconds without one

    def observe(self, proposer_id: str, seconds: float, *, drafted: bool) -> None:
        """Take in an answer, so long after a commit for which no draft was left."""
        share, empty_s = self._known.get(proposer_id, (1.0, 0.0))
        if not drafted:
            empty_s += (seconds - empty_s) * (1 - ANSWER_FADE if empty_s else 1.0)
        share += (drafted - share) * (1 - ANSWER_FADE)
        remember(self._known, proposer_id, (share, empty_s))

    def gain_s(self, proposer_id: str, gain_s: float) -> float:
        """Return what waiting for an answer gains, if one with a draft gains so much."""
        share, empty_s = self._known.get(proposer_id, (1.0, 0.0))
        return share * gain_s - (1.0 - share) * empty_s
