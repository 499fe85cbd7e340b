"""Decide how long a row waits for its own draft, and ready rows for those of others.

Waiting `d` for a draft brings `gain` more tokens, and costs what the row would commit meanwhile. A
step without the draft commits one token, and steps after it `gain` more where the next draft is at
hand at no cost, which is so for a share `free` of them. So waiting pays if

    d <= gain * step_time / (1 + free * gain)

and a row does not wait at all if its proposer's mean delay is beyond that.

Where rows draft on demand on another device, one half of them is verified while that device drafts
for the other half. With t(n) the seconds of a step of n rows, D those until they have their drafts,
and B those that drafting takes of D, all rows together have a round in t(n) + D. Halves have one in
the longer of 2 t(n / 2) and 2 B.

Where drafts are made ahead, most are at hand when a step ends, and all rows stay together: those
that missed go on without a draft, or the step waits for them while that brings more tokens than
all rows commit meanwhile. What comes later is used in the next step, as far as it is still true.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from operator import itemgetter

import numpy as np

from outrider.policy.base import R, Ready, Row
from outrider.policy.measurements import Measurements
from outrider.policy.row import Drafting

MAX_PATIENCE_S = 0.25  # that a text may stand still
LONG_STEPS = 3.0  # what a row waits at most for a first block, and at least while all is unknown


class Waiting:
    """Answers from what was measured."""

    def __init__(self, measured: Measurements, num_speculative_tokens: int) -> None:
        self._measured, self._steps, self._k = measured, measured.steps, num_speculative_tokens

    def patience_s(self, row: Row, num_running: int, *, unknown: bool) -> float:
        """Return how long after its last commit a row waits for its draft at most.

        That is until most drafts have come, and no longer than it pays (noted as `worth_waiting`).
        All rounds together wait for a session's first block about as long as the prompt took. While
        it is `unknown` what drafts take, a row waits longer. It waits for none that usually come
        later than that.
        """
        d = row.drafting
        k, times = d.num_draft_tokens, self._measured.draft_times(d)
        step_s, usual_s = self._steps.round_s(k), times.delays.mean_s(k)
        if not d.awaited.blocks:
            prefill_s = row.counters.prefill_s / num_running  # the step took all prompts
            allowed_s = min(MAX_PATIENCE_S, LONG_STEPS * step_s + prefill_s)
            left_s = d.awaited.since + allowed_s - d.round.committed_at
            return max(0.0, left_s) if usual_s <= allowed_s else 0.0
        gain, free = d.measured.gain, d.measured.free_after_miss.mean
        gain_s = min(MAX_PATIENCE_S, gain * step_s / (1.0 + free * gain))
        if unknown:
            longer_s = min(MAX_PATIENCE_S, max(gain_s, LONG_STEPS * step_s))
            return longer_s if usual_s <= longer_s else 0.0
        d.measured.worth_waiting = usual_s <= times.share.mean * gain_s
        return min(gain_s, times.delays.most_s(k)) if d.measured.worth_waiting else 0.0

    def in_halves(self, rows: Rows[Row]) -> bool:
        """Return whether one half of the rows is to be verified while others are drafted for."""
        each = [row.drafting for row in rows]
        waiting = [d for d in each if d.round.committed_at < d.round.deadline and d.waits]
        if not waiting or any(d.runs_ahead or not d.proposer.own_device for d in waiting):
            return False
        longest = max(waiting, key=lambda d: d.num_draft_tokens)
        k, delays = longest.num_draft_tokens, self._measured.draft_times(longest).delays
        step_s = self._steps.estimate((len(rows) + 1) // 2 * (1 + k))
        drafting_s = delays.mean_s(k) * delays.drafting.mean
        together_s = self._steps.estimate(len(rows) * (1 + k)) + delays.mean_s(k)
        return 0.0 < 2 * max(step_s, drafting_s) <= together_s

    def together(
        self, ready: list[R], waiting: Rows[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        """Return all rows, or until when they wait for drafts."""
        rate = self.rate(waiting, ready, num_prefilling)
        best, most, gain = now, 0.0, 0.0
        due = [(self.due(row.drafting, now), row.drafting.measured.gain) for row in waiting]
        for at, gained in sorted(due):
            gain += gained
            if gain - rate * (at - now) > most:
                best, most = at, gain - rate * (at - now)
        deadlines = [row.drafting.round.deadline for row in waiting]
        wake_at = best if rate else max(deadlines, default=now)
        if now < wake_at:  # of a row that waits no longer nothing is expected: ask again then
            return Ready([], min(wake_at, *deadlines))
        return Ready([*ready, *waiting], now)

    def rate(self, waiting: Rows[Row], ready: Rows[Row], num_prefilling: int) -> float:
        """Return the tokens a second of a step at once; 0 if unknown, or for patience to decide."""
        step_s = self._steps.round_s(self._k)
        if not (step_s and (ready or num_prefilling)):
            return 0.0
        gain = sum([row.drafting.measured.gain for row in ready if row.draft is not None])
        return (len(waiting) + len(ready) + num_prefilling + gain) / step_s

    def start_at(
        self, ready: Rows[Row], waiting: Rows[Row], num_prefilling: int, now: float
    ) -> float:
        """Return when ready rows start: later if all rows have their round earlier then.

        If they wait until j of m others can join, the round of all ends at

            max(wait + t(ready + j), D) + t(m - j)

        with D the time until the last draft is there, which is later where a step shares its
        device, also if it is overdue. For j = m there is no second step.
        """
        lacking = [row.drafting for row in waiting]
        awaited = sorted([(self.due(d, now), d) for d in lacking], key=itemgetter(0))
        due = np.array([due_at for due_at, _ in awaited]) - now
        per_row = 1 + max([d.num_draft_tokens for d in lacking])
        joining, going = np.arange(len(due) + 1), len(ready) + num_prefilling
        steps_s = self._steps.estimates(np.arange(going + len(due) + 1.0) * per_row)
        steps_s[0] = 0.0
        last_to_come = {d.drafter: (at, d) for at, d in awaited if not d.proposer.own_device}
        times, k = self._measured.draft_times, per_row - 1
        late_s = [at - now + times(d).contention_s(k) for at, d in last_to_come.values()]
        first_s = np.concatenate(((0.0,), due)) + steps_s[going + joining]
        first_s[:-1] = np.maximum(first_s[:-1], max([due[-1], *late_s]))
        best = int((first_s + steps_s[len(due) - joining]).argmin())
        return now + float(due[best - 1]) if best else now

    def due(self, d: Drafting, now: float) -> float:
        """Return when a row's draft is expected; its deadline if it is overdue or unknown."""
        delays = self._measured.draft_times(d).delays
        usual = d.round.committed_at + delays.mean_s(d.num_draft_tokens)
        return usual if now < usual < d.round.deadline else d.round.deadline
