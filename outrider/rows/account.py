"""Count what became of drafts, in each row's own account and in the step's.

Nothing is decided by these counts: they are for `aux_info` and metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows

from outrider.counts import StepCounts, context_class
from outrider.policy.base import Policy, Row
from outrider.rounds import Counters, Round


class DraftAccount:
    """The counts since the last step's events; the engine adds to them, too."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.counts = StepCounts()

    def take(self) -> StepCounts:
        """Return what was counted since the last call."""
        counts, self.counts = self.counts, StepCounts()
        return counts

    def launched(self, row: Row, drafted: int, now: float) -> None:
        """Count a row that goes into a step with so many draft tokens."""
        d, c, current = row.drafting, row.counters, row.drafting.round
        c.iter_count += 1
        if (fate := draft_fate(row, drafted)) is not None:
            c.fates[fate] += 1
            self.counts.fates[d.proposer_id or "", fate] += 1
        if current.looked_at is None:
            return
        waited_s = now - current.looked_at if not current.at_hand and d.waits else 0.0
        if waited_s > 0.0:
            c.waits += 1
            c.wait_s += waited_s
            self.counts.wait_s += waited_s
        c.fallback_rounds += not drafted and d.offered.limit > 0

    def launched_at_rest(self, rows: Iterable[Row]) -> None:
        """Count rows that `rest`, and go into a step."""
        for row in rows:
            row.counters.iter_count += 1
            d = row.drafting
            if d.offered.limit and d.round.looked_at is not None:
                row.counters.fallback_rounds += 1

    def arrived(self, row: Row, proposer_id: str, propose_s: float, network_s: float) -> None:
        """Count the time of a draft."""
        for counts in (row.counters, self.counts):
            counts.propose_s += propose_s
            counts.network_s += network_s
        if proposer_id not in row.counters.proposer_ids:
            row.counters.proposer_ids.append(proposer_id)

    def preempted(self, row: Row) -> None:
        """Count a row that lost its pages."""
        row.counters.preemptions += 1
        self.counts.preemptions += 1

    def undrafted_rounds(self, rows: Rows[Counters], verified_s: float) -> None:
        """Count rounds without drafts, each with one token; the step took `verified_s`."""
        for counters in rows:
            counters.undrafted += 1
            counters.score_s += verified_s
        self.counts.rounds[0, 0] += len(rows)
        self.counts.score_s += verified_s * len(rows)

    def round(
        self,
        counters: Counters,
        round_: Round,
        num_output: int,
        drafted_by: tuple[str, str],
        verified_s: float | None,
        base_len: int,
    ) -> None:
        """Count a row's round in its own account and in the step's.

        `num_output` tokens of the round are output, after trimming. `drafted_by` names proposer and
        method. `verified_s` is the step's time; None for the row's first round, of its prompt.
        `base_len` tokens were committed before it.
        """
        counts, drafted = self.counts, round_.drafted
        accepted = min(round_.accepted, num_output)
        if num_output:
            proposer_id, method = drafted_by
            counters.count_round(drafted, accepted, method)
            if drafted or verified_s is not None:
                counts.rounds[drafted, accepted] += 1
            if drafted:
                counts.drafted_by[proposer_id] += drafted
                counts.accepted_by[proposer_id] += accepted
                context = context_class(base_len)
                for each in (counters, counts):
                    each.drafts_by_context[context] += 1
                    each.accepted_by_context[context] += accepted
        if verified_s is not None:
            counters.score_s += verified_s
            counts.score_s += verified_s

    def step(self, tokens: int, num_rows: int, way: str, *, decoded: bool) -> None:
        """Count a step's output, and where it only decoded, the time it takes without drafts."""
        counts, policy = self.counts, self._policy
        counts.output_tokens += tokens
        counts.way = way
        if decoded:
            plain_s = policy.measured.steps.estimate(num_rows)
            counts.plain_s += plain_s * counts.output_tokens / num_rows


def draft_fate(row: Row, drafted: int) -> str | None:
    """Return which of `DRAFT_FATES` a round's draft had; None if the round wanted no draft."""
    d, current = row.drafting, row.drafting.round
    if current.looked_at is None:  # it processed its prompt, and missed nothing
        return "hit" if drafted else None
    if current.at_hand:
        return "hit" if d.num_draft_tokens else None
    if (drafted or row.draft is not None) and not (d.runs_ahead and d.waits):
        return "waited"
    if not d.waits:
        return None
    if d.awaited.no_guess_at == len(row.token_ids):
        return "none"
    return "wrong" if current.wrong else "late"


def rests(row: Row, *, drafting: bool) -> bool:
    """Return whether nobody drafts for a row now, and nothing is left of a draft to account for.

    `drafting` says whether rows that have a proposer are to have drafts.
    """
    if row.draft is not None:
        return False
    d = row.drafting
    if not d.offered.draftable:
        return True
    return not (drafting or d.num_draft_tokens or d.awaited.asked or d.unlearned)
