"""How many tokens a row is to draft: K by the expected committed tokens per second of the row.

    goodput(k) = (1 + accepted(k)) / (step_time(rows * (1 + k)) + wait(k))

`accepted(k)` = a + a^2 + ... + a^k with `a` the row's own moving average of acceptance, which
begins as its proposer's over rows of its kind; step times are measured by size. For k = 0 no row
waits.

Of a draft tree K counts the nodes, which is what a step's time follows, and `a` is the chance that
the target's token is among a node's children: a round tries one place per level until one fails.
So `accepted` is taken of the tree's depth, k times the row's measured depth per node.

Where most rows draft on demand, and to wait pays by their proposer's average, a row of low
acceptance waits with them: alone it would only run its steps beside their drafts. It compares with
1 / (step_time + wait(0)): what verifying costs.

A draft takes its proposer `D(k)` from the commit to its arrival, measured, corrected by the time
per drafted token; `h` is the row's share of hits: rounds whose draft was at hand at once. So

    wait(k) = (1 - h) * D(max(k, l - 1))    drafting on demand, l: its batches' longest draft
    wait(k) = max(0, w - (1 - h) * (D(k') - D(k)))    drafting ahead

with `w` the row's average wait and k' its present number. (On demand, `w` would say little: a row
that does not wait for its drafts has them late, and on a shared device slows them down. And where
rows share a batch, one that wants less waits no shorter; l - 1, so that all together can shrink.)
"""

from __future__ import annotations

from outrider.engine.policy.acceptance import ALMOST_SURE, Acceptance
from outrider.engine.policy.cost_model import CostModel
from outrider.engine.rounds import Drafting

NEARLY = 0.95  # of the best goodput: such differences between sizes are noise
COMPANY_ROUNDS = 4  # over which the share of rows that draft fades


class Goodput:
    """Chooses K by it, and keeps the share of rows for which that is not 0."""

    def __init__(self, costs: CostModel, acceptance: Acceptance) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._company = 0.0  # the share of rows that draft, fading

    @property
    def most_draft(self) -> bool:
        """Whether more than half of the rows draft."""
        return self._company > 0.5

    def best_k(self, d: Drafting, limit: int) -> int:
        """Of a row's next round: 0 if no draft pays, `limit` until a step was measured."""
        plain = self._costs.round_s(0)
        if not plain:
            return limit
        # Gone through for each row before its commit is told: a call per K would be half the time.
        rounds, missed, ahead_s = self._costs.rounds(d, limit), 1.0 - d.hit_share, 0.0
        if d.runs_ahead:
            ahead_s = d.wait_s - missed * self._costs.delay_s(d)

        def rates(acceptance: float) -> list[float]:
            a = min(acceptance, ALMOST_SURE)
            a_l, gain = a**d.levels, a / (1.0 - a)  # accepted(k) = gain * (1 - a_l^k)
            return [
                (1.0 + gain * (1.0 - a_l**k))
                / (step_s + wait_s if (wait_s := ahead_s + missed * delay_s) > 0.0 else step_s)
                for k, step_s, delay_s in rounds
            ]

        mine = rates(d.successes / d.trials)
        best, without = max(mine), 1.0 / plain
        if best <= without and self._in_company(d):
            others = self._acceptance.of_proposer(d)
            if others is not None and max(rates(others)) > without:
                without = 1.0 / (plain + missed * self._costs.delay_s(d, 0))
        num_rows = self._costs.num_rows
        self._company += ((best > without) - self._company) / (COMPANY_ROUNDS * num_rows)
        if best <= without:
            return 0
        least = NEARLY * best
        return max([k for (k, _, _), rate in zip(rounds, mine, strict=True) if rate >= least])

    def _in_company(self, d: Drafting) -> bool:
        """Whether most rows wait for drafts on demand, and this one with them in any case."""
        return self._costs.num_rows > 1 and not d.runs_ahead and self.most_draft
