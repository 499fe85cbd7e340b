"""Count what became of drafts, in each row's own account and in the step's.

Nothing is decided by these counts: they are for `aux_info` and metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Rows

from outrider.counts import StepCounts, context_class
from outrider.policy.base import Policy, Row
from outrider.rounds import CountedRound, Counters, Round

RoundDone = tuple[Counters, Round, int, tuple[str, str], int, bool]
"""A row's round: its output tokens, after trimming; proposer and method; committed tokens before
it; whether it is the row's first, of its prompt."""


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

    def launched_at_once(self, rows: Iterable[Row]) -> None:
        """Do what `launched` does for rows whose drafts were there when they were looked at."""
        hits: list[str] = []
        for row in rows:
            row.counters.iter_count += 1
            if row.drafting.num_draft_tokens:
                row.counters.fates["hit"] += 1
                hits.append(row.drafting.offered.proposer.proposer_id or "")
        for proposer_id, number in Counter(hits).items():
            self.counts.fates[proposer_id, "hit"] += number

    def launched_at_rest(self, rows: Iterable[Row]) -> None:
        """Count rows that `rest`, and go into a step."""
        for row in rows:
            row.counters.iter_count += 1
            d = row.drafting
            if d.offered.limit and d.round.looked_at is not None:
                row.counters.fallback_rounds += 1

    def arrived(self, row: Counters, proposer_id: str, propose_s: float, network_s: float) -> None:
        """Count the time of a draft."""
        row.propose_s += propose_s
        row.network_s += network_s
        self.counts.propose_s += propose_s
        self.counts.network_s += network_s
        if proposer_id not in row.proposer_ids:
            row.proposer_ids.append(proposer_id)

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

    def rounds(self, rows: Iterable[RoundDone], verified_s: float) -> None:
        """Count rounds in their rows' accounts and in the step's; the step took `verified_s`."""
        counts, counted = self.counts, list[CountedRound]()
        for counters, round_, num_output, (proposer_id, method), base_len, first in rows:
            if num_output and round_.drafted:
                accepted = min(round_.accepted, num_output)
                key = round_.drafted, accepted, proposer_id, method, context_class(base_len)
                counters.drafted_rounds[key] += 1
                counted.append(key)
            elif num_output:
                counters.undrafted += 1
                if not first:
                    counts.rounds[0, 0] += 1
            if not first:
                counters.score_s += verified_s
                counts.score_s += verified_s
        for (drafted, accepted, proposer_id, _, context), number in Counter(counted).items():
            counts.rounds[drafted, accepted] += number
            counts.drafted_by[proposer_id] += drafted * number
            counts.accepted_by[proposer_id] += accepted * number
            counts.drafts_by_context[context] += number
            counts.accepted_by_context[context] += accepted * number

    def step(self, tokens: int, num_rows: int, draft_mode: str, *, decoded: bool) -> None:
        """Count a step's output, and where it only decoded, the time it takes without drafts."""
        counts, policy = self.counts, self._policy
        counts.output_tokens += tokens
        counts.draft_mode = draft_mode
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
