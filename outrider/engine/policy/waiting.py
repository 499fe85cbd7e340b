"""How long rows wait: each for its own draft, and those that are ready for the others'.

Waiting `d` for a draft brings `accepted` more tokens, and costs what the row would commit
meanwhile: one token per step. So it pays if

    d <= accepted * step_time

and a row does not wait at all if its proposer's mean delay is beyond that. The draft that comes
later is used as far as it is still true. Nor does it wait if its proposer has a draft so seldom
that waiting for its answers loses more than drafts bring (acceptance.py).

Where most rows draft on demand, on another device, they go in two halves (microbatches.py). On the
scorer's own device they stay together: in two cohorts a round takes t(a) + max(t(b), D) instead of
t(a + b) + D. That is less only where a step's time follows its tokens; there drafting brings
little, and steps slow the drafts down.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.engine.policy import microbatches
from outrider.engine.policy.base import Measurements
from outrider.engine.policy.draft_length import DraftLength
from outrider.engine.sequence import Sequence

FIRST_PATIENCE_S = 0.25  # a proposer must process the prompt before its first block
MIN_PATIENCE_S, MAX_PATIENCE_S = 0.002, 0.1  # for later ones: less is noise, more is felt
TRYING_STEPS = 3.0  # that a row waits at least when it tries more
FIRST_PATIENCE_STEPS = 3.0  # for a first block, beside the prompt's own time


class Waiting:
    """Answers from what was measured; `length` knows whether most rows draft."""

    def __init__(self, measured: Measurements, length: DraftLength) -> None:
        self._costs = measured.costs
        self._availability = measured.availability
        self._length = length

    def patience_s(self, seq: Sequence, num_running: int, *, tries_more: bool) -> float:
        """Return how long after its last commit a row waits for its draft at most.

        That is until most drafts have come, and no longer than waiting pays. All rounds together
        wait for a session's first block about as long as the prompt took: a proposer that is busy
        with many prompts must not hold a row back round after round.
        """
        d = seq.drafting
        step_s, mean_s, usual_s = self._costs.usual(d)
        if not d.blocks:
            prefill_s = seq.counters.prefill_s / num_running  # the step took all prompts
            allowed_s = min(FIRST_PATIENCE_S, FIRST_PATIENCE_STEPS * step_s + prefill_s)
            return max(0.0, d.awaited_since + allowed_s - d.round.committed_at)
        gain_s = d.acceptance.expected_accepted(d.num_draft_tokens) * step_s
        gain_s = max(MIN_PATIENCE_S, gain_s)
        if tries_more:  # a draft that comes too late says nothing of those that are waited for
            return min(MAX_PATIENCE_S, max(gain_s, TRYING_STEPS * step_s))
        if mean_s > gain_s:
            return 0.0
        # On a shared device the search would slow down a step beside it: the row waits.
        d.worth_waiting = (
            not d.proposer.own_device
            or self._availability.gain_s(d.proposer_id or "", gain_s - mean_s) >= 0.0
        )
        return min(MAX_PATIENCE_S, gain_s, usual_s) if d.worth_waiting else 0.0

    def microbatch_step_s(self, rows: Rows[Sequence]) -> float:
        """Return the seconds of a step of half the rows if they are to go in halves, else 0."""
        longest, k = None, 0
        for seq in rows:
            d = seq.drafting
            if d.waits:
                if d.runs_ahead or not d.proposer.own_device:
                    return 0.0
                if d.num_draft_tokens > k:
                    longest, k = d, d.num_draft_tokens
        times = None if longest is None else self._costs.draft_times(longest)
        if times is None:
            return 0.0
        step_s = self._costs.step_s(microbatches.half(len(rows)) * (1 + k))
        together_s = self._costs.step_s(len(rows) * (1 + k)) + times.mean_s(k)
        faster = microbatches.pay_off(step_s, together_s, times.mean_s(k), k * times.token_s)
        return step_s if faster else 0.0

    def start_at(
        self,
        ready: Rows[Sequence],
        waiting: Rows[Sequence],
        num_prefilling: int,
        now: float,
        microbatch_step_s: float = 0.0,
    ) -> float:
        """Return when ready rows start: later if all rows have their round earlier then.

        If they wait until j of m others can join, the round of all ends at

            max(wait + t(ready + j), D) + t(m - j)

        with D the time until the last draft is there, later where steps share its device. For j = m
        there is no second step.
        """
        dues = [self._due(seq, now) for seq in waiting]
        arrivals = sorted(dues)
        if microbatch_step_s:
            return microbatches.start_at(len(ready), arrivals, microbatch_step_s, now)
        # A first block waits for its prompt's processing: only its own row waits for it.
        known = [due for seq, due in zip(waiting, dues, strict=True) if seq.drafting.blocks]
        together = known and not num_prefilling and self._length.most_draft
        if together and all(_on_demand(seq) for seq in (*ready, *waiting)):
            return max(known)
        per_row = 1 + max([seq.drafting.num_draft_tokens for seq in waiting])
        going, num_waiting = len(ready) + num_prefilling, len(waiting)
        contention_s = max([self._costs.contention_s(seq.drafting) for seq in waiting])
        all_there_s = arrivals[-1] - now + contention_s

        def step_s(num_rows: int) -> float:
            return self._costs.step_s(num_rows * per_row) if num_rows else 0.0

        best, shortest_s = now, max(step_s(going), all_there_s) + step_s(num_waiting)
        for joining, due in enumerate(arrivals, start=1):
            left = num_waiting - joining
            first_s = due - now + step_s(going + joining)
            round_s = (max(first_s, all_there_s) if left else first_s) + step_s(left)
            if round_s < shortest_s:
                best, shortest_s = due, round_s
        return best

    def _due(self, seq: Sequence, now: float) -> float:
        """When a row's draft is expected; its deadline if it is overdue."""
        d = seq.drafting
        usual = d.round.committed_at + self._costs.usual(d)[1]  # in the past if it is unknown
        return usual if now < usual < d.round.deadline else d.round.deadline


def _on_demand(seq: Sequence) -> bool:
    return seq.drafting.waits and not seq.drafting.runs_ahead
