"""The policy that measures, and maximises committed tokens per second.

Trials tell whether to draft at all (mode.py). How many tokens each row drafts is one choice over
all rows of a step (choose_nodes.py). How long rows wait (waiting.py) follows from the same times.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from outrider.policy.base import Policy, R, Ready, Row, StepDone
from outrider.policy.choose_nodes import choose_nodes
from outrider.policy.measurements import CONFIDENCES_PER_BIN
from outrider.policy.mode import FEWEST_STEPS, MOST_STEPS, ModeSelector
from outrider.policy.row import ConfidentDraft, Drafting
from outrider.policy.waiting import Waiting

Seconds = NDArray[np.float64]
TRIED_TOKENS = 16  # at most while all is unknown: one round of 128 costs as much as several
UNCUT_AFTER = 16  # steps in which a lone draft was cut: what a longer step takes may have changed
TRY_STEPS = 4  # of longer drafts, after many in which hardly any row drafted


class AdaptivePolicy(Policy):
    """Composes mode, choice of draft tokens and waiting over one set of measurements."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self._modes = ModeSelector()
        self._waiting = Waiting(self.measured, num_speculative_tokens)
        self._num_running = 1
        self._idle_steps, self._try_after = 0, FEWEST_STEPS
        self._cut_steps = 0  # of a lone draft, since one was verified whole

    @property
    def drafting(self) -> bool:
        return self._modes.current.drafting and self.num_speculative_tokens > 0

    @property
    def may_wait(self) -> bool:
        return self.drafting and not self._modes.current.catching_up

    def drafting_at(self, size: int) -> bool:
        return self._modes.drafting_at(size) and self.num_speculative_tokens > 0

    @property
    def _unknown(self) -> bool:
        """True while the times and the acceptance of drafts are unknown, or outdated."""
        current = self._modes.current
        begun = current.on_trial and current.settling > 0.0
        outdated = self.drafting and (begun or self._idle_steps >= self._try_after)
        return outdated or not self.measured.steps.estimate(1)

    @property
    def stance(self) -> object:
        return self.drafting, self.may_wait, self._unknown

    def choose_counts(self, rows: Rows[Drafting]) -> list[int]:
        limits = np.array([d.offered.max_draft_tokens for d in rows])
        depth = int(limits.max())
        if not (depth and self.may_wait):  # of drafts one token tells that they come
            return [min(limit, int(self.drafting)) for limit in limits.tolist()]
        survivals = self.measured.acceptance.survivals(rows, depth)
        depths = np.arange(depth)
        survivals *= depths < limits[:, None]  # [rows, depth]
        if self._unknown:
            chosen = (survivals > 0.0) & (depths < TRIED_TOKENS)
        else:
            chosen = self._choose(rows, survivals) & (survivals > 0.0)
            self._try_longer(rows, chosen)
        for d, gain in zip(rows, (survivals * chosen).sum(1).tolist(), strict=True):
            d.measured.gain = gain
        return [*chosen.sum(1).tolist()]

    def _choose(self, rows: Rows[Drafting], survivals: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which tokens are worth their step's time and their delay [rows, depth].

        All rows wait for the longest draft, and the likeliest nodes are the deep ones of few rows.
        So greatest depths are compared, each with its own likeliest nodes.
        """
        steps, depths = self.measured.steps, [survivals.shape[1]]
        while depths[-1] > 1:
            depths.append(3 * depths[-1] // 4)
        num_rows = max(len(rows), steps.num_rows)
        steps_s = steps.of_rows(num_rows, num_rows + np.arange(survivals.size + 1.0))
        best, fastest = np.zeros(survivals.shape, bool), 0.0
        for most, wait_s in zip(depths, self._waits_s(rows, depths), strict=True):
            nodes = survivals[:, :most]
            likeliest = np.sort(nodes, axis=None)[::-1]
            seconds = self._round_s(num_rows, steps_s[: nodes.size + 1], wait_s)
            seconds[0] = np.inf  # whether to draft at all is not added up, but measured
            chosen = choose_nodes(nodes, likeliest, seconds, len(rows))
            speed = (len(rows) + nodes[chosen].sum()) / seconds[np.count_nonzero(chosen)]
            if speed > fastest:
                fastest, best[:, :most], best[:, most:] = speed, chosen, False
        return best

    def _try_longer(self, rows: Rows[Drafting], chosen: NDArray[np.bool_]) -> None:
        """Let a lone row draft longer if no such step ran for long: a burst may have slowed it."""
        steps, count = self.measured.steps, int(chosen[0].sum())
        longer = min(count + max(1, count // 3), chosen.shape[1])
        alone = len(rows) == steps.num_rows == 1 and 0 < count < longer
        alone = alone and self.measured.draft_times(rows[0]).share.mean > 0.5  # else none may come
        if alone and steps.outdated(steps.sizes.run_one(1, 1 + longer)):
            chosen[0, :longer], rows[0].stance, self._cut_steps = True, None, UNCUT_AFTER

    def cut(self, drafts: Rows[ConfidentDraft], num_rows: int, num_others: int) -> list[bool]:
        steps, rows = self.measured.steps, [d for d, _ in drafts]
        if steps.padded or self._unknown or self._cut_steps == UNCUT_AFTER:
            self._cut_steps = 0
            return super().cut(drafts, num_rows, num_others)
        if len(drafts) == 1 and not drafts[0][1].parents:
            return self._cut_chain(rows[0], drafts[0][1].confidences, num_rows, num_others)
        survivals = self.measured.acceptance.survivals_of_nodes(drafts)
        tokens = np.arange(num_others, num_others + survivals.size + 1.0)
        [waited_s] = self._waits_s(rows, [max([d.num_draft_tokens for d in rows])])
        seconds = self._round_s(num_rows, steps.of_rows(num_rows, tokens), waited_s)
        chosen = choose_nodes(survivals, np.sort(survivals)[::-1], seconds, num_rows)
        self._cut_steps = 0
        return [*chosen.tolist()]

    def _cut_chain(self, d: Drafting, told: bytes, num_rows: int, num_others: int) -> list[bool]:
        """Do what `cut` does for one chain.

        After a forward on a CPU little of what arrays run is in its caches: they take .2 ms here.
        """
        steps, rates = self.measured.steps, self.measured.acceptance.by_confidence(d)
        [waited_s] = self._waits_s([d], [d.num_draft_tokens])
        cohorts = max(num_rows, self._num_running) / num_rows
        survival, tokens, fastest, count = 1.0, float(num_rows), 0.0, 0
        for i in range(len(told) + 1):
            if i:
                survival *= rates.item(i - 1, told[i - 1] // CONFIDENCES_PER_BIN)
                tokens += survival
            step_s = steps.estimate(steps.sizes.run_one(num_rows, num_others + i))
            speed = tokens / max(step_s, (step_s + waited_s) / cohorts)
            if speed > fastest:
                fastest, count = speed, i
        self._cut_steps = 0 if count == len(told) else self._cut_steps + 1
        return [i < count for i in range(len(told))]

    def _round_s(self, num_rows: int, steps_s: Seconds, wait_s: float) -> Seconds:
        """Return the seconds from step to step; other rows have steps while these wait."""
        cohorts = max(num_rows, self._num_running) / num_rows
        return np.maximum(steps_s, (steps_s + wait_s) / cohorts)

    def _waits_s(self, rows: Rows[Drafting], depths: Rows[int]) -> list[float]:
        """Return how long a step waits for drafts of so many tokens, in the mean."""
        drafters = {d.drafter: d for d in rows}.values()
        delays = [self.measured.draft_times(d).delays for d in drafters]
        missed = 1.0 - sum([d.measured.free_hits.mean for d in rows]) / len(rows)
        return [missed * max([each.mean_s(depth) for each in delays]) for depth in depths]

    def patience_s(self, row: Row) -> float:
        return self._waiting.patience_s(row, self._num_running, unknown=self._unknown)

    def choose_rows(
        self, ready: list[R], waiting: Rows[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        if any(row.drafting.runs_ahead for row in waiting):
            return self._waiting.together(ready, waiting, num_prefilling, now)
        if self.may_wait and self._waiting.in_halves((*ready, *waiting)):
            half = (len(ready) + len(waiting) + 1) // 2  # at most, those that waited longest
            ready = sorted(ready, key=lambda row: row.drafting.round.committed_at)[:half]
        elif waiting and (ready or num_prefilling):
            start_at = self._waiting.start_at(ready, waiting, num_prefilling, now)
            if start_at > now:
                return Ready([], min(start_at, *[row.drafting.round.deadline for row in waiting]))
        return super().choose_rows(ready, waiting, num_prefilling, now)

    def step_done(self, step: StepDone) -> None:
        self._num_running = max(1, step.num_running)
        self._idle_steps += bool(step.proposer_ids)  # others would have to go without in any case
        tried = self._idle_steps > self._try_after
        if 2 * step.drafted > step.num_rows or self._idle_steps > self._try_after + TRY_STEPS:
            self._try_after = min(2 * self._try_after, MOST_STEPS) if tried else FEWEST_STEPS
            self._idle_steps = 0
        self._modes.step_done(step)
