"""What happens to rows' drafts, from a proposer's attachment to the step that verifies a draft.

The only writer of `Drafting`, with the measurements that it feeds. It asks the policy for every
decision.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from outrider.counts import StepCounts
from outrider.draft_port import DraftOffer
from outrider.draft_tree import DraftTree
from outrider.engine.policy.base import Policy, Ready
from outrider.engine.policy.circuit_breaker import MISSES_ALLOWED, CircuitBreaker
from outrider.engine.policy.draft_mode import SAMPLED_TEMPERATURE, DraftMode
from outrider.engine.policy.row import (
    CurrentRound,
    Drafting,
    HitRate,
    PastCommit,
)
from outrider.engine.policy.timing import Delay, remember
from outrider.engine.policy.waiting import FIRST_PATIENCE_S, MAX_PATIENCE_S
from outrider.engine.rounds import USEFUL, BlockFate, Round
from outrider.engine.sequence import Sequence
from outrider.params import MAX_SPECULATIVE_TOKENS
from outrider.types import Request

WAIT_FADE, HIT_FADE = 0.8, 0.9  # kept per round of the moving averages of waits and of hits


@dataclass(frozen=True, slots=True)
class ArrivedBlock:
    """A block that came for a row, and its fate."""

    seq: Sequence
    block: DraftTree
    fate: BlockFate
    proposer_id: str
    method: str
    draft_s: float  # as the proposer says
    at: float


class DraftTracker:
    """Keeps the state of all rows' drafts."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.counts = StepCounts()
        """What happened since the last step's events; the engine adds to it too."""
        self._drafters: dict[str, str] = {}  # by proposer: what drafted for it last
        self._batches: dict[tuple[str, bool], float] = {}  # when each drafter's last one came
        self._in_vain: dict[str, int] = {}  # by proposer: drafts awaited since its last timely one
        self._launched_at = 0.0

    def take_counts(self) -> StepCounts:
        """Return what was counted since the last call."""
        counts, self.counts = self.counts, StepCounts()
        return counts

    def start(self, request: Request) -> Drafting:
        """Return the initial state of a request's row."""
        speculation = request.speculation
        limit = speculation.num_speculative_tokens
        if not speculation.enabled or not self.policy.num_speculative_tokens:
            limit = 0
        elif limit is None:  # then the proposer sets a limit: see `attach`
            limit = MAX_SPECULATIVE_TOKENS
        return Drafting(limit, sampled=request.sampling.temperature >= SAMPLED_TEMPERATURE)

    def attach(self, seq: Sequence, proposer: DraftOffer, now: float) -> None:
        """Give a row to a proposer."""
        asked = proposer.requested
        self.learn(seq)  # from the proposer before
        d = seq.drafting
        if proposer.proposer_id != d.proposer.proposer_id:
            d.breaker, d.hits, d.blocks = CircuitBreaker(), HitRate(wait_s=d.hits.wait_s), 0
            d.awaited_since = d.last_block_at = now
            d.commits.clear()
            d.commits.append(PastCommit(len(seq.token_ids), now, asked))
            if proposer.proposer_id is not None:
                d.drafter = self._drafters.get(proposer.proposer_id, f"{proposer.proposer_id} ")
                acceptance = self.policy.measured.acceptance
                acceptance.join(d.acceptance, proposer.proposer_id, sampled=d.sampled)
                d.worth_waiting = True
        d.proposer = proposer
        self._choose_k(d, asked=asked)
        d.asked = d.num_draft_tokens > 0

    def block_arrived(self, arrived: ArrivedBlock) -> None:
        """Learn from a block, and count the time that it took."""
        seq, block, fate = arrived.seq, arrived.block, arrived.fate
        d, length = seq.drafting, len(seq.token_ids)
        d.blocks += 1
        if block.token_ids:
            d.drafter = f"{arrived.proposer_id} {arrived.method}"
            if self._drafters.get(arrived.proposer_id) != d.drafter:
                remember(self._drafters, arrived.proposer_id, d.drafter)
        if fate is USEFUL:
            d.breaker.close()
            if block.base_len < length:  # the guess was right, and late
                d.round.wrong = False
        elif fate is BlockFate.WRONG:
            d.round.wrong = True
        elif block.base_len == length:  # an empty block
            d.no_guess_at = length
            d.breaker.deadline_misses = 0
        asked_at = self._answered(arrived)
        # No proposer drafted for longer than it was asked; without a commit, since its last block.
        passed_s = max(0.0, arrived.at - (d.last_block_at if asked_at is None else asked_at))
        d.last_block_at = max(d.last_block_at, arrived.at)
        if fate is USEFUL or (asked_at is not None and passed_s <= MAX_PATIENCE_S):
            self._in_vain.pop(arrived.proposer_id, None)
        propose_s = min(arrived.draft_s, passed_s)
        c, counts = seq.counters, self.counts
        c.propose_s += propose_s
        counts.propose_s += propose_s
        if asked_at is not None:
            c.network_s += passed_s - propose_s
            counts.network_s += passed_s - propose_s
        if arrived.proposer_id not in c.proposer_ids:
            c.proposer_ids.append(arrived.proposer_id)

    def _answered(self, arrived: ArrivedBlock) -> float | None:
        """Measure the delay since the commit that a block answers, and return that time, if any."""
        d = arrived.seq.drafting
        for i, commit in enumerate(d.commits):
            if commit.length == arrived.block.base_len:
                del d.commits[i]  # a second block for the same commit measures nothing
                if commit.awaited and d.blocks > 1:  # the first one also took the prompt's time
                    self._measure(arrived, commit.at)
                return commit.at
        return None

    def _measure(self, arrived: ArrivedBlock, since: float) -> None:
        d, now, num_tokens = arrived.seq.drafting, arrived.at, len(arrived.block.token_ids)
        proposer, measured = d.proposer, self.policy.measured
        proposer_id, drafted = proposer.proposer_id or "", num_tokens > 0
        measured.availability.observe(proposer_id, now - since, drafted=drafted)
        d.worth_waiting |= num_tokens > 0  # however late: whether waiting pays is decided again
        batch = d.drafter, d.runs_ahead
        if not num_tokens or self._batches.get(batch) == now:  # the first of a batch is its longest
            return
        remember(self._batches, batch, now)
        began, ended = d.waited_in_vain
        measured.costs.observe_delay(
            d,
            Delay(
                now - since,
                arrived.draft_s,
                num_tokens,
                uncontended=proposer.colocated or self._launched_at < since,
                own_device=proposer.own_device and not d.runs_ahead,
                waited_s=ended - began if began == since else 0.0,
            ),
        )

    def choose_rows(self, rows: Rows[Sequence], num_prefilling: int, now: float) -> Ready:
        """Return which rows run now, of those that lack at most a draft."""
        ready: list[Sequence] = []
        waiting: list[Sequence] = []
        may_wait = self.policy.may_wait
        for seq in rows:
            current = seq.drafting.round
            lacks_draft = seq.draft is None and _is_awaited(seq)
            if current.looked_at is None:
                current.looked_at, current.at_hand = now, seq.draft is not None
                patient = lacks_draft and not self._is_set_aside(seq.drafting)
                patience_s = self.policy.patience_s(seq) if patient else 0.0
                current.deadline = current.committed_at + patience_s if lacks_draft else now
            if not may_wait:
                current.deadline = min(current.deadline, current.committed_at)  # nothing is missed
            (waiting if lacks_draft and now < current.deadline else ready).append(seq)
        return self.policy.choose_rows(ready, waiting, num_prefilling, now)

    def launched(self, seq: Sequence, drafted: int, now: float) -> bool:
        """Note that a row went into a step with `drafted` tokens.

        Returns whether its circuit breaker opens: it awaited its proposer's drafts in vain.
        """
        self._launched_at = now
        opens = self._count_launch(seq, drafted, now)
        self.learn(seq)
        return opens

    def _count_launch(self, seq: Sequence, drafted: int, now: float) -> bool:
        d, c, current = seq.drafting, seq.counters, seq.drafting.round
        c.iter_count += 1
        if (fate := _draft_fate(seq, drafted)) is not None:
            c.fates[fate] += 1
            self.counts.fates[d.proposer_id or "", fate] += 1
        if current.looked_at is None:  # it processed its prompt, and missed nothing
            return False
        wanted = _is_awaited(seq) or (current.at_hand and d.num_draft_tokens > 0)
        self._count_hit(seq, wanted)
        waited_s = now - current.looked_at if not current.at_hand and d.waits else 0.0
        if waited_s > 0.0:
            c.waits += 1
            c.wait_s += waited_s
            self.counts.wait_s += waited_s
        d.hits.wait_s = WAIT_FADE * d.hits.wait_s + (1 - WAIT_FADE) * waited_s
        if drafted:
            d.breaker.forgive()
            return False
        c.fallback_rounds += d.limit > 0
        if seq.draft is not None:  # there was a draft, which this step did not verify
            return False
        if current.committed_at < current.deadline <= now:
            d.waited_in_vain = current.committed_at, now
        if d.breaker.is_open:
            d.breaker.rounds_left -= 1
            return False
        # A proposer from which nothing has come for long is missed, waited for or not.
        silent = not d.blocks and now > d.awaited_since + FIRST_PATIENCE_S
        silent = silent or self._is_set_aside(d)
        if not wanted or not (current.deadline > current.committed_at or silent):
            return False
        proposer_id = d.proposer_id or ""
        remember(self._in_vain, proposer_id, self._in_vain.get(proposer_id, 0) + 1)
        return d.breaker.missed()

    def _is_set_aside(self, d: Drafting) -> bool:
        """Whether the row has no block yet, and other rows awaited its proposer in vain."""
        return not d.blocks and self._in_vain.get(d.proposer_id or "", 0) >= MISSES_ALLOWED

    def _count_hit(self, seq: Sequence, wanted: bool) -> None:
        """Count whether a round that `wanted` a draft had it at once."""
        d, c, current = seq.drafting, seq.counters, seq.drafting.round
        if not wanted:
            d.hits.last = None
            return
        # What is left of a late draft is no hit: only a proposer that runs ahead means it so.
        hit = current.at_hand and (d.runs_ahead or seq.draft_base == len(seq.token_ids))
        if d.hits.last is not None:
            (c.after_hit if d.hits.last else c.after_miss)[hit] += 1
        d.hits.last = hit
        d.hits.share += ((hit and not d.proposer.colocated) - d.hits.share) * (1 - HIT_FADE)

    def preempted(self, seq: Sequence) -> None:
        """Note that a row lost its pages: it waits for no draft until it has them again."""
        seq.drafting.round.looked_at = None
        seq.counters.preemptions += 1
        self.counts.preemptions += 1

    def round_done(self, seq: Sequence, round_: Round, wrong: bool, now: float) -> None:
        """Note a row's commit; `wrong` says that its draft fell off the committed path."""
        d = seq.drafting
        if d.round.looked_at is None or not d.asked:  # no draft was to come before
            d.awaited_since = now
        d.asked = d.num_draft_tokens > 0
        d.round = CurrentRound(committed_at=now, wrong=wrong)
        d.commits.append(PastCommit(len(seq.token_ids), now, seq.draft is None))
        d.unlearned = round_

    def learn(self, seq: Sequence) -> None:
        """Take in what a row's last round showed, and choose K; once per round.

        That is when the row goes into its next step, and for the round after that. Earlier the
        device or the proposer would have to wait for it.
        """
        d = seq.drafting
        if d.unlearned is None:
            return
        round_, d.unlearned = d.unlearned, None
        acceptance = self.policy.measured.acceptance
        if round_.drafted:
            acceptance.observe(d.acceptance, d.proposer_id, round_, sampled=d.sampled)
        else:
            acceptance.observe_undrafted(d.acceptance, d.proposer_id, sampled=d.sampled)
        self._choose_k(d)

    def _choose_k(self, d: Drafting, *, asked: bool = True) -> None:
        """Choose how the row comes to its next draft, and K; 0 if it is not to be `asked` for."""
        d.runs_ahead = d.proposer.runs_ahead and self.policy.mode is not DraftMode.ON_DEMAND
        limit = min(d.limit, d.proposer.max_draft_tokens) if asked else 0
        d.num_draft_tokens = min(self.policy.choose_k(d, limit), limit) if limit else 0


def _draft_fate(seq: Sequence, drafted: int) -> str | None:
    """Return which of `DRAFT_FATES` a round's draft had; None if the round wanted no draft."""
    d, current = seq.drafting, seq.drafting.round
    if current.looked_at is None:  # it processed its prompt, and missed nothing
        return "hit" if drafted else None
    if current.at_hand:
        return "hit" if d.num_draft_tokens else None
    if seq.draft is not None and not (d.runs_ahead and d.waits):
        return "waited"
    if not d.waits:
        return None
    if d.no_guess_at == len(seq.token_ids):
        return "none"
    return "wrong" if current.wrong else "late"


def _is_awaited(seq: Sequence) -> bool:
    """Whether the row waits for a draft, and its proposer has not said that it has none."""
    d = seq.drafting
    return d.waits and d.no_guess_at != len(seq.token_ids)
