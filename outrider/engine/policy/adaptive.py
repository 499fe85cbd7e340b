"""The policy that measures: when rows go, with their drafts or without, and how they draft.

Everything maximises committed tokens per second. How many tokens a row drafts is said in
goodput.py, and what `accepted(k)` and D are, a draft's seconds from the commit to its arrival.

A row whose draft is at hand goes at once. For one without, waiting `d` brings accepted(k) more
tokens, and costs what it would commit in `d` otherwise, at the rate of a row that never waits:
(1 + f) / step_time, with `f` its measured average of tokens accepted from hits. So it pays if

    d <= accepted(k) * step_time / (1 + f)

and a row does not wait at all if its proposer's mean delay is beyond that: the draft that comes
later is used as far as it is still true. Nor if its proposer has a guess so seldom that to wait for
its answers loses more than guesses bring (answers.py). Nor if others go now and their step is
longer than that: its draft could be verified only after it.

Where most rows draft on demand, on another device, halves of them take turns (microbatches.py). On
the scorer's own they stay together: in two cohorts, one's drafts beside another's step, a round is
t(a) + max(t(b), D) instead of t(a + b) + D, less only where a step's time follows its tokens. There
drafting brings little, and the second D is D and most of a step.

A step takes as long as if each row had as many drafts as the longest. Drafts that came ahead for a
few of n rows are therefore not verified, but kept, unless (n + gain) / t(n * (1 + k)) is more than
n / t(n).

No formula knows how much drafting slows down the steps beside it, or how often drafts made ahead
for many rows come too late: whether to draft, and whether ahead, is decided by trial (contests.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import accumulate

from outrider.engine.policy import microbatches
from outrider.engine.policy.acceptance import Acceptance, expected_gain
from outrider.engine.policy.base import Policy
from outrider.engine.policy.circuit_breaker import FIRST_PATIENCE_S
from outrider.engine.policy.cost_model import CostModel
from outrider.engine.policy.draft_availability import DraftAvailability, worth_asking
from outrider.engine.policy.goodput import Goodput
from outrider.engine.policy.mode import DraftMode
from outrider.engine.policy.mode_selector import ModeSelector
from outrider.engine.policy.mode_trials import STRETCH
from outrider.engine.policy.probe import Probe
from outrider.engine.policy.timing import Delay, StepDone, remember
from outrider.engine.rounds import Drafting, Round
from outrider.engine.sequence import Sequence
from outrider.types import Request

LARGEST_PROBE = 16  # or twice the present K: one round of 128 costs as much as several
MIN_PATIENCE_S, MAX_PATIENCE_S = 0.002, 0.1
STEPS_OF_PATIENCE = 3.0


class AdaptivePolicy(Policy):
    """Chooses K by expected goodput, and waits about as long as blocks usually take."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self._costs = CostModel()
        self._acceptance = Acceptance()
        self._answers = DraftAvailability()
        self._goodput = Goodput(self._costs, self._acceptance)
        self._probes: dict[str, Probe] = {}  # by proposer
        self._contests = ModeSelector()
        self._runs_ahead = False  # a proposer can
        self._steps_since_ahead = 0  # of rows whose proposers all cannot
        self._num_steps = 0
        self._num_running = 1

    def choose_k(self, drafting: Drafting, limit: int) -> int:
        d, contest = drafting, self._contests.current
        if not self.may_wait:  # as few as tell that they come, or none
            d.probing = False
            return min(limit, 1) if contest.following else 0
        d.probing = (contest.beginning and not d.runs_ahead) or self._probe(d.proposer_id).on
        if d.probing:
            return min(limit, max(LARGEST_PROBE, 2 * d.num_draft_tokens))
        return self._goodput.best_k(d, limit)

    def patience(self, seq: Sequence) -> float:
        """Blocks' mean delay and a little more, at most as long as waiting pays.

        Until the session's first block came, about as long as the prompt took, all rounds together:
        a proposer that is busy with many prompts must not hold a row back round after round.
        """
        d = seq.drafting
        step, mean, usual = self._costs.usual(d)
        if not d.blocks:
            prefill_s = seq.counters.prefill_s / self._num_running  # it took all prompts, too
            allowed = min(FIRST_PATIENCE_S, STEPS_OF_PATIENCE * step + prefill_s)
            return max(0.0, d.awaited_since + allowed - d.committed_at)
        worth = max(MIN_PATIENCE_S, self._worth(d, step))
        if d.probing and (times := self._costs.draft_times(d)) is not None:
            worth = max(worth, STEPS_OF_PATIENCE * step)  # what comes too late tells nothing
            if not times.uncontended:  # with no step beside it a draft may come sooner
                return min(MAX_PATIENCE_S, worth)
        if mean > worth:
            return 0.0
        d.has_guesses = worth_asking(d, worth - mean)
        return min(MAX_PATIENCE_S, worth, usual) if d.has_guesses else 0.0

    def _worth(self, d: Drafting, step: float) -> float:
        """Seconds that it pays to wait for a draft at most."""
        return expected_gain(d) * step / (1.0 + d.free_tokens)

    def hold(
        self,
        ready: Rows[Sequence],
        others_ready: int,
        waiting: Rows[Sequence],
        now: float,
        turn_s: float = 0.0,
    ) -> float:
        """Wait for drafts that are due soon if all rows together have their round earlier then.

        Holding rows back by `delay` until j of m others can join, the round of all ends at

            max(delay + t(ready + j), D) + t(m - j)

        with D the time until the last draft is there, later where steps share its device. For j = m
        there is no second step. Rows on demand of which most draft wait for one another, or halves
        of them take microbatches.
        """
        dues = [self._due(seq, now) for seq in waiting]
        arrivals = sorted(dues)
        if turn_s:
            return microbatches.begins_at(len(ready), arrivals, turn_s, now)
        # Nobody waits for a first block, with its prompt's processing, but its own row.
        known = [due for seq, due in zip(waiting, dues, strict=True) if seq.drafting.blocks]
        together = known and not others_ready and self._goodput.most_draft
        if together and all(_on_demand(seq) for seq in (*ready, *waiting)):
            return max(known)
        per_row = 1 + max([seq.drafting.num_draft_tokens for seq in waiting])
        going, num_waiting = len(ready) + others_ready, len(waiting)
        stall = max([self._costs.contention_s(seq.drafting) for seq in waiting])
        all_there = arrivals[-1] - now + stall

        def step_s(rows: int) -> float:
            return self._costs.step_s(rows * per_row) if rows else 0.0

        go_at, shortest = now, max(step_s(going), all_there) + step_s(num_waiting)
        for joining, due in enumerate(arrivals, start=1):
            left = num_waiting - joining
            first = due - now + step_s(going + joining)
            round_s = (max(first, all_there) if left else first) + step_s(left)
            if round_s < shortest:
                go_at, shortest = due, round_s
        return go_at

    def turn_s(self, rows: Rows[Sequence]) -> float:
        if not (self._goodput.most_draft and self.may_wait):
            return 0.0
        longest, k = None, 0
        for seq in rows:
            d = seq.drafting
            if d.waits:
                if d.runs_ahead or not d.own_device:
                    return 0.0
                if d.num_draft_tokens > k:
                    longest, k = d, d.num_draft_tokens
        times = None if longest is None else self._costs.draft_times(longest)
        if times is None:
            return 0.0
        step_s = self._costs.step_s(microbatches.half(len(rows)) * (1 + k))
        together_s = self._costs.step_s(len(rows) * (1 + k)) + times.uncontended_s(k)
        pays = microbatches.pay(step_s, together_s, times.mean_s(k), k * times.token_s)
        return step_s if pays else 0.0

    def goes_along(self, d: Drafting, num_ready: int) -> bool:
        """Its draft could be verified only after that step, however soon it comes."""
        if not d.runs_ahead or d.probing or not d.blocks:
            return False
        step = self._costs.round_s(d.num_draft_tokens)
        return self._worth(d, step) < self._costs.step_s(num_ready * (1 + d.num_draft_tokens))

    def drafts_pay(self, rows: Rows[Sequence]) -> bool:
        """Not where the few that came ahead lengthen the step of all. What was waited for does."""
        with_draft = [seq.drafting for seq in rows if seq.draft is not None]
        if not with_draft or any(d.probing or not d.runs_ahead for d in with_draft):
            return True
        n, k = len(rows), max([d.num_draft_tokens for d in with_draft])
        plain, drafted = self._costs.step_s(n), self._costs.step_s(n * (1 + k))
        gains = accumulate(map(expected_gain, with_draft))  # those of a few are often enough
        return any((n + gain) * plain >= n * drafted for gain in gains)

    def _due(self, seq: Sequence, now: float) -> float:
        """When a row's draft is expected; its deadline if it is overdue."""
        d = seq.drafting
        usual = d.committed_at + self._costs.usual(d)[1]  # in the past if it is unknown
        return usual if now < usual < d.deadline else d.deadline

    def drafting(self, request: Request) -> Drafting:
        d = super().drafting(request)
        self._acceptance.begin(d)
        return d

    def expect(self, drafting: Drafting, proposer_id: str) -> None:
        if proposer_id not in self._probes:  # what drafting costs was measured with others
            self._probe(proposer_id)
            self._runs_ahead |= drafting.can_run_ahead
            self._contests = ModeSelector(ahead=self._runs_ahead)
        self._acceptance.join(drafting, proposer_id)
        self._answers.join(drafting, proposer_id)

    def observe_delay(self, drafting: Drafting, delay: Delay) -> None:
        self._costs.observe_delay(drafting, delay)

    def observe_answer(self, drafting: Drafting, seconds: float, *, guessed: bool) -> None:
        self._answers.observe(drafting, seconds, guessed=guessed)

    def observe_round(self, drafting: Drafting, round_: Round) -> None:
        d = drafting
        self._acceptance.observe(d, round_)
        tries_most = d.probing or d.num_draft_tokens >= min(d.limit, d.proposer_limit)
        most, d.tries_most = d.tries_most, tries_most  # of the round before, and of this one
        self._probe(d.proposer_id).observe(self._num_steps, most=most, drafted=round_.drafted > 0)

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        self._costs.observe_step(num_rows, num_tokens, seconds)

    def step_done(self, step: StepDone) -> None:
        self._num_running = max(1, step.num_running)
        if step.comparable:
            self._note_ahead(possible=step.may_run_ahead)
        before = self._contests.current.way
        self._contests.step_done(step)
        contest = self._contests.current
        catching_up = contest.following or (
            contest.beginning and not contest.incumbent.drafts and step.followed < step.num_rows
        )
        if catching_up:  # beside prompts drafts take long
            self._costs.forget_drafts()
        elif contest.beginning and contest.way is not before:  # what is known is of other rows
            self._costs.forget_drafts(ahead=contest.way is DraftMode.AHEAD)

    def _note_ahead(self, *, possible: bool) -> None:
        """Who could run ahead may have gone: then it is no way, nor a rival to drafts on demand."""
        self._steps_since_ahead = 0 if possible else self._steps_since_ahead + 1
        if possible > self._runs_ahead or (self._runs_ahead and self._steps_since_ahead == STRETCH):
            self._runs_ahead = possible
            self._contests = ModeSelector(ahead=possible)

    @property
    def may_wait(self) -> bool:
        return self._contests.current.drafting and not self._contests.current.following

    @property
    def way(self) -> DraftMode:
        return self._contests.current.way

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        return self._contests.undrafted_sizes

    def plain_step_s(self, num_rows: int) -> float:
        return self._costs.step_s(num_rows)

    def _probe(self, proposer_id: str | None) -> Probe:
        """Counted on from row to row: answers may all be too short for a probe of their own."""
        name = proposer_id or ""
        if name not in self._probes:
            remember(self._probes, name, Probe())
        return self._probes[name]


def _on_demand(seq: Sequence) -> bool:
    return seq.drafting.waits and not seq.drafting.runs_ahead
