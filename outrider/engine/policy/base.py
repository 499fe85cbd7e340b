"""When a row goes ahead without its draft, and how many tokens to draft.

The scheduler asks which rows are ready (`split`) and how many draft tokens a row's next round
takes (`Drafting.num_draft_tokens`: K, of a tree all nodes), and reports what happened. `Policy` has
a fixed K and a fixed patience; `AdaptivePolicy` (adaptive.py) overrides what it decides with what
it measures. What is counted of a row that goes is in misses.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

from outrider.counts import StepCounts
from outrider.draft_tree import DraftTree
from outrider.engine.policy.circuit_breaker import HIT_FADE, count_launch, owed
from outrider.engine.policy.microbatches import next_half
from outrider.engine.policy.mode import DraftMode
from outrider.engine.policy.timing import WARM, Delay, StepDone, remember
from outrider.engine.rounds import USEFUL, BlockFate, Drafting, Round
from outrider.engine.sequence import Sequence
from outrider.params import MAX_SPECULATIVE_TOKENS
from outrider.types import Request


class Ready(NamedTuple):
    """Which of the rows that lack only a draft are to run now."""

    rows: list[Sequence]
    wake_at: float  # when to ask again at the latest, if nothing runs


class Policy:
    """Every round drafts K tokens and waits up to `max_wait_s` for them."""

    def __init__(self, num_speculative_tokens: int, *, max_wait_s: float = 0.02) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_wait_s = max_wait_s
        self.counts = StepCounts()  # since the last step's events; the engine adds to it too
        self._drafters: dict[str, str] = {}  # by proposer: what drafted for it last
        self._launched_at = 0.0
        self._batch = ("", False, 0.0)  # of drafts that came last: by whom, whether ahead, when

    # What a subclass may decide otherwise.

    def choose_k(self, drafting: Drafting, limit: int) -> int:  # noqa: ARG002
        """Draft tokens of a row's next round; `limit` is what request and proposer allow."""
        return limit

    def patience(self, seq: Sequence) -> float:  # noqa: ARG002
        """Seconds after its last commit that a row waits for a draft at most."""
        return self.max_wait_s

    def turn_s(self, rows: Rows[Sequence]) -> float:  # noqa: ARG002
        """Seconds of a step of half the rows, where halves of them take turns; else 0."""
        return 0.0

    def hold(
        self,
        ready: Rows[Sequence],  # noqa: ARG002
        others_ready: int,  # noqa: ARG002
        waiting: Rows[Sequence],  # noqa: ARG002
        now: float,
        turn_s: float = 0.0,  # noqa: ARG002
    ) -> float:
        """Until when rows that are ready hold back so that `waiting` ones can join them.

        `others_ready` process prompts. `now`: go.
        """
        return now

    def goes_along(self, d: Drafting, num_ready: int) -> bool:  # noqa: ARG002
        """Whether a row that could wait takes part in a step that others begin now."""
        return False

    def drafts_pay(self, rows: Rows[Sequence]) -> bool:  # noqa: ARG002
        """Whether a step of these rows is to verify the drafts that they have."""
        return True

    def expect(self, drafting: Drafting, proposer_id: str) -> None:
        """A proposer begins with a row: what is known of the proposer holds for the row."""

    def observe_delay(self, drafting: Drafting, delay: Delay) -> None:
        """A draft came for a row."""

    def observe_answer(self, drafting: Drafting, seconds: float, *, guessed: bool) -> None:
        """The answer came to a commit for which no draft was left, perhaps without a guess."""

    def observe_round(self, drafting: Drafting, round_: Round) -> None:
        """A row's round verified tokens, perhaps none."""

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of that size took this long, forward and verification."""

    def step_done(self, step: StepDone) -> None:
        """A step ended."""

    @property
    def may_wait(self) -> bool:
        """Whether any row is to wait for a draft now, whatever was asked for before."""
        return True

    @property
    def way(self) -> DraftMode:
        """How rows come to their drafts now; ahead only from proposers that can."""
        return DraftMode.AHEAD

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        """Numbers of rows at which nothing is drafted at present, by their bit length."""
        return frozenset()

    def plain_step_s(self, num_rows: int) -> float:  # noqa: ARG002
        """Seconds that a step of so many rows without drafts is expected to take; 0: unknown."""
        return 0.0

    # The bookkeeping that every policy shares.

    def take_counts(self) -> StepCounts:
        """What was counted since the last call."""
        counts, self.counts = self.counts, StepCounts()
        return counts

    def drafting(self, request: Request) -> Drafting:
        """The initial state of a request's row."""
        speculation = request.speculation
        limit = speculation.num_speculative_tokens
        if limit is None:  # then it is who drafts that sets a limit: see `attach`
            limit = MAX_SPECULATIVE_TOKENS if self.num_speculative_tokens else 0
        if not speculation.enabled:
            limit = 0
        return Drafting(limit=limit, warm=request.sampling.temperature >= WARM)

    def attach(
        self, seq: Sequence, proposer_id: str | None, limit: int, now: float, *, asked: bool = True
    ) -> None:
        """A proposer took the session on, or (None) left it; it drafts at most `limit` tokens.

        It was `asked` for a draft, or follows for now.
        """
        self.learn(seq)  # from the proposer before
        d = seq.drafting
        if proposer_id != d.proposer_id:
            d.misses = d.rest = d.next_rest = d.blocks = 0
            d.hit, d.hit_share, d.free_tokens = None, 0.0, 0.0
            d.awaited_since = now
            d.commits.clear()
            d.commits.append((len(seq.token_ids), now, asked))
            if proposer_id is not None:
                d.drafter = self._drafters.get(proposer_id, proposer_id)
                self.expect(d, proposer_id)
        d.proposer_id, d.proposer_limit = proposer_id, limit
        self._choose(d, asked=asked)
        d.asked = d.num_draft_tokens > 0

    def block_arrived(
        self,
        seq: Sequence,
        block: DraftTree,
        fate: BlockFate,
        draft_s: float,
        now: float,
        method: str = "",
    ) -> float:
        """A block came. Returns the seconds since the commit it answers; 0 if it answers none."""
        d, base_len = seq.drafting, block.base_len
        d.blocks += 1
        if block.token_ids and (name := d.proposer_id) is not None:
            d.drafter = f"{name} {method}"
            if self._drafters.get(name) != d.drafter:
                remember(self._drafters, name, d.drafter)
        if fate is USEFUL:
            d.misses = d.rest = 0
            if base_len < len(seq.token_ids):  # the guess was right, and late
                d.wrong = False
        elif fate is BlockFate.WRONG:
            d.wrong = True
        elif base_len == len(seq.token_ids):  # an empty block
            d.no_guess_at, d.misses = base_len, 0
        for i, (length, when, wanted) in enumerate(d.commits):
            if length == base_len:
                del d.commits[i]  # a second block for the same commit measures nothing
                if wanted and d.blocks > 1:  # the first one also took the prompt's processing
                    self._answered(d, len(block.token_ids), draft_s, when, now)
                return now - when if now > when else 0.0
        return 0.0

    def _answered(
        self, d: Drafting, num_tokens: int, draft_s: float, when: float, now: float
    ) -> None:
        """So many tokens came for a commit, made `when` no draft was left: what they took."""
        self.observe_answer(d, now - when, guessed=num_tokens > 0)
        batch = d.drafter, d.runs_ahead, now
        if not num_tokens or batch == self._batch:  # none took no drafting
            return
        self._batch = batch  # of which the first draft tells
        uncontended = d.colocated or self._launched_at < when
        apart = d.own_device and not d.runs_ahead
        since, until = d.in_vain
        waited_s = until - since if since == when else 0.0
        self.observe_delay(
            d, Delay(now, now - when, draft_s, num_tokens, uncontended, apart, waited_s)
        )

    def split(self, rows: Rows[Sequence], others_ready: int, now: float) -> Ready:
        """Of rows that lack only a draft, those to run now.

        `others_ready` counts rows that run in any case (prompt processing).
        """
        ready: list[Sequence] = []
        waiting: list[Sequence] = []
        may_wait = self.may_wait
        for seq in rows:
            d = seq.drafting
            lacks_draft = seq.draft is None and owed(seq)
            if d.looked_at is None:
                d.looked_at, d.at_hand = now, seq.draft is not None
                d.deadline = d.committed_at + self.patience(seq) if lacks_draft else now
            if not may_wait:
                d.deadline = min(d.deadline, d.committed_at)  # and nothing is missed
            (waiting if lacks_draft and now < d.deadline else ready).append(seq)
        if turn_s := self.turn_s(rows):
            ready = next_half(ready, len(waiting))
        if not waiting:
            return Ready(ready, now)
        wake_at = min([seq.drafting.deadline for seq in waiting])
        if ready or others_ready:
            go_at = self.hold(ready, others_ready, waiting, now, turn_s)
            if go_at > now:
                return Ready([], min(go_at, wake_at))
            along = [seq for seq in waiting if self.goes_along(seq.drafting, len(ready))]
            return Ready(ready + along, now)
        return Ready(ready, wake_at)

    def launch(self, seq: Sequence, drafted: int, now: float) -> bool:
        """A row goes into a step with `drafted` tokens. True if its proposer is set aside by it."""
        self._launched_at = now
        aside = count_launch(seq, drafted, self.counts, now)
        self.learn(seq)
        return aside

    def preempted(self, seq: Sequence) -> None:
        """A row lost its pages. It waits for nothing and misses nothing until it has them again."""
        seq.drafting.looked_at = None
        seq.counters.preemptions += 1
        self.counts.preemptions += 1

    def round_done(self, seq: Sequence, round_: Round, wrong: bool, now: float) -> None:
        """A row emitted tokens; `wrong` says that its draft fell off the committed path."""
        d = seq.drafting
        if d.looked_at is not None:
            free = round_.accepted if d.hit and not d.colocated else 0
            d.free_tokens += (free - d.free_tokens) * (1 - HIT_FADE)
        if d.looked_at is None or not d.asked:  # no draft was to come before
            d.awaited_since = now
        d.asked = d.num_draft_tokens > 0
        d.looked_at, d.wrong, d.committed_at = None, wrong, now
        d.commits.append((len(seq.token_ids), now, seq.draft is None))
        d.unlearned = round_

    def learn(self, seq: Sequence) -> None:
        """Take in what a row's last round showed, and chooses K; once per round.

        When the row goes into its next step, and for the round after that: before, the device, or
        else the proposer, would have to wait for it.
        """
        d = seq.drafting
        if d.unlearned is not None:
            round_, d.unlearned = d.unlearned, None
            self.observe_round(d, round_)
            self._choose(d)

    def _choose(self, d: Drafting, *, asked: bool = True) -> None:
        """How the row comes to its next draft, and K; 0 if it is not to be `asked` for."""
        d.runs_ahead = d.can_run_ahead and self.way is not DraftMode.ON_DEMAND
        limit = min(d.limit, d.proposer_limit) if asked and d.proposer_id is not None else 0
        d.num_draft_tokens = min(self.choose_k(d, limit), limit) if limit else 0
