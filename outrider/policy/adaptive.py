"""The policy that measures, and maximises committed tokens per second.

Trials tell whether to draft at all (mode.py). How many tokens each row drafts is one choice over
all rows of a step (choose_nodes.py). How long rows wait (waiting.py) follows from the same times.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from outrider.policy.base import Policy, R, Ready, Row, StepDone
from outrider.policy.choose_nodes import choose_nodes
from outrider.policy.mode import FEWEST_STEPS, MOST_STEPS, ModeSelector
from outrider.policy.row import ConfidentDraft, Drafting
from outrider.policy.waiting import Waiting

TRIED_TOKENS = 16  # at most while all is unknown: one round of 128 costs as much as several
TRY_STEPS = 4  # of longer drafts, after many in which hardly any row drafted


class AdaptivePolicy(Policy):
    """Composes mode, choice of draft tokens and waiting over one set of measurements."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self._modes = ModeSelector()
        self._waiting = Waiting(self.measured, num_speculative_tokens)
        self._num_running = 1
        self._idle_steps, self._try_after = 0, FEWEST_STEPS

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
        if not (depth and self.may_wait):  # one token shows that drafts come
            return [min(limit, int(self.drafting)) for limit in limits.tolist()]
        survivals = self.measured.acceptance.survivals(rows, depth)
        survivals *= np.arange(depth) < limits[:, None]  # [rows, depth]
        chosen = np.zeros(survivals.shape, bool)
        if self._unknown:
            chosen[:, :TRIED_TOKENS] = True
        else:
            best = self._choose(rows, survivals)
            chosen[:, : best.shape[1]] = best
            self._try_longer(rows, chosen)
        chosen &= survivals > 0.0
        for d, gain in zip(rows, (survivals * chosen).sum(1).tolist(), strict=True):
            d.measured.gain = gain
        return [*chosen.sum(1).tolist()]

    def _choose(self, rows: Rows[Drafting], survivals: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which tokens [rows, depth] are worth their step's time and their delay.

        All rows wait for the longest draft, and the likeliest nodes are the deep ones of few rows.
        So greatest depths are compared, each with its own likeliest nodes.
        """
        steps, depths = self.measured.steps, [survivals.shape[1]]
        while depths[-1] > 1:
            depths.append(3 * depths[-1] // 4)
        num_rows = max(len(rows), steps.num_rows)
        cohorts = max(num_rows, self._num_running) / num_rows  # others have steps while these wait
        steps_s = steps.of_rows(num_rows, num_rows + np.arange(survivals.size + 1.0))
        steps_s[0] = np.inf  # whether to draft at all is not added up, but measured
        fastest, best = 0.0, survivals > 0.0
        for most, wait_s in zip(depths, self._waits_s(rows, depths), strict=True):
            nodes = survivals[:, :most]
            step_s = steps_s[: nodes.size + 1]
            seconds = np.maximum(step_s, (step_s + wait_s) / cohorts)
            chosen, speed = choose_nodes(nodes.ravel(), seconds, len(rows))
            if speed > fastest:
                fastest, best = speed, chosen.reshape(nodes.shape)
        return best

    def _try_longer(self, rows: Rows[Drafting], chosen: NDArray[np.bool_]) -> None:
        """Let a lone row draft longer if no such step ran for long: a burst may have slowed it."""
        steps, count = self.measured.steps, int(chosen[0].sum())
        longer = min(count + max(1, count // 3), chosen.shape[1])
        alone = len(rows) == steps.num_rows == 1
        alone = alone and self.measured.draft_times(rows[0]).share.mean > 0.5  # else none may come
        if alone and count < longer and steps.outdated(steps.sizes.run_one(1, 1 + longer)):
            chosen[0, :longer], rows[0].stance = True, None  # chosen anew after that round

    def cut(self, drafts: Rows[ConfidentDraft], num_rows: int, num_others: int) -> list[bool]:
        steps, whole = self.measured.steps, super().cut(drafts, num_rows, num_others)
        size = len(whole)
        if steps.padded or self._unknown:
            return whole
        if num_rows == 1 and steps.outdated(steps.sizes.run_one(1, num_others + size)):
            return whole  # what such a step takes may have changed
        rows = [d for d, _ in drafts]
        [waited_s] = self._waits_s(rows, [max([d.num_draft_tokens for d in rows])])
        survivals = self.measured.acceptance.survivals_of_nodes(drafts)
        if len(drafts) == 1 and not drafts[0][1].parents:
            # After a forward on a CPU what arrays run is in no cache, and takes .2 ms.
            committed = accumulate(survivals, initial=float(num_rows))
            sizes = [steps.sizes.run_one(num_rows, num_others + n) for n in range(size + 1)]
            step_s = [steps.estimate(each) + waited_s for each in sizes]
            speeds = [tokens / s for tokens, s in zip(committed, step_s, strict=True)]
            count = speeds.index(max(speeds))
            return [n < count for n in range(size)]
        seconds = steps.of_rows(num_rows, np.arange(num_others, num_others + size + 1.0)) + waited_s
        return [*choose_nodes(np.array(survivals), seconds, num_rows)[0].tolist()]

    def _waits_s(self, rows: Rows[Drafting], depths: Rows[int]) -> list[float]:
        """Return how long a step waits for drafts of so many tokens, in the mean."""
        waiting = {d.drafter: d for d in [d for d in rows if d.measured.worth_waiting] or rows}
        delays = [self.measured.draft_times(d).delays for d in waiting.values()]
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
