"""How many tokens a row is to draft: K by its expected committed tokens per second.

    goodput(k) = (1 + accepted(k)) / (step_time(rows * (1 + k)) + wait(k))

`accepted(k)` is a + a^2 + ... + a^k with `a` the row's acceptance. Step times are measured by
size. For k = 0 no row waits. Of a draft tree K counts the nodes, which a step's time follows, and
`accepted` is taken of its depth: a round tries one place per level until one fails.

A draft takes D(k) from the commit to its arrival, and `h` is the row's share of hits: rounds whose
draft was at hand at once. So

    wait(k) = (1 - h) * D(max(k, l - 1))             on demand, l: its batches' longest draft
    wait(k) = max(0, w - (1 - h) * (D(k') - D(k)))   ahead

with `w` the row's average wait and k' its present K. On demand `w` would say little, since a row
that does not wait has its drafts late. Rows of a batch get their drafts when the longest is done,
so one that wants less waits no shorter; with l - 1 all of them can shrink together.

Where most rows draft on demand, and waiting pays by their proposer's average, a row of low
acceptance waits with them: alone it would only run its steps beside their drafts.
"""

from __future__ import annotations

from outrider.engine.policy.acceptance import ALMOST_SURE, Acceptance
from outrider.engine.policy.cost_model import CostModel
from outrider.engine.policy.row import Drafting

NEARLY = 0.95  # of the best goodput: smaller differences between sizes are noise
SHARE_ROUNDS = 4  # over which the share of rows that draft fades


class DraftLength:
    """Chooses K by goodput, and keeps the share of rows for which that is not 0."""

    def __init__(self, costs: CostModel, acceptance: Acceptance) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._drafting_share = 0.0

    @property
    def most_draft(self) -> bool:
        """Whether more than half of the rows draft."""
        return self._drafting_share > 0.5

    def best_k(self, d: Drafting, limit: int) -> int:
        """Return K of a row's next round; `limit` until a step was measured."""
        (_, plain_s, _), *rounds = self._costs.rounds(d, limit)
        if not plain_s:
            return limit
        # For each row and step: a method call per K would take half of the time.
        missed, ahead_s = 1.0 - d.hits.share, 0.0
        if d.runs_ahead:
            ahead_s = d.hits.wait_s - missed * self._costs.delay_s(d, d.num_draft_tokens)
        levels = d.acceptance.levels

        def goodputs(acceptance: float) -> list[float]:
            a = min(acceptance, ALMOST_SURE)
            a_l, gain = a**levels, a / (1.0 - a)  # accepted(k) = gain * (1 - a_l^k)
            return [
                (1.0 + gain * (1.0 - a_l**k))
                / (step_s + wait_s if (wait_s := ahead_s + missed * delay_s) > 0.0 else step_s)
                for k, step_s, delay_s in rounds
            ]

        mine, without = goodputs(d.acceptance.rate), 1.0 / plain_s
        best = max(mine)
        most_wait = self.most_draft and not d.runs_ahead
        if best <= without and most_wait and self._costs.num_rows > 1:
            others = self._acceptance.of_proposer(d.proposer_id, sampled=d.sampled)
            if others is not None and max(goodputs(others)) > without:
                without = 1.0 / (plain_s + missed * self._costs.delay_s(d, 0))
        window = SHARE_ROUNDS * self._costs.num_rows
        self._drafting_share += ((best > without) - self._drafting_share) / window
        if best <= without:
            return 0
        least = NEARLY * best
        return max([k for (k, _, _), rate in zip(rounds, mine, strict=True) if rate >= least])
