"""Track rows' drafts, from a proposer's attachment to the step that verifies a draft.

It writes `Drafting`, in which the policy keeps answers of its own, and feeds the measurements. It
asks the policy for every decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import replace
from itertools import chain, islice, repeat

from outrider.bounded import remember
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.drafted_nodes import NO_NODES, DraftNodes
from outrider.params import MAX_SPECULATIVE_TOKENS
from outrider.policy.base import Policy, R, Ready, Row, StepDone
from outrider.policy.circuit_breaker import MISSES_ALLOWED, CircuitBreaker
from outrider.policy.draft_times import DraftTimes
from outrider.policy.row import (
    SAMPLED_TEMPERATURE,
    Awaited,
    CurrentRound,
    Drafting,
    Measured,
    Offered,
    PastCommit,
)
from outrider.policy.waiting import MAX_PATIENCE_S
from outrider.rounds import UNDRAFTED, USEFUL, BlockFate, Round
from outrider.rows.account import DraftAccount, rests
from outrider.types import Request

ROUNDS_AT_ONCE, OF_A_ROW = 8, 4  # rounds that are learned from, at least

ArrivedBlock = tuple[Row, PostedBlock, BlockFate, float]
"""A block for a row, and when it came."""


class DraftTracker:
    """Keeps the state of all rows' drafts."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.may_draft = policy.num_speculative_tokens > 0  # else no row ever has a draft
        self.account = DraftAccount(policy)
        self._drafters: dict[str, str] = {}  # by proposer: what drafted for it last
        self._in_vain: dict[str, int] = {}  # by proposer: drafts awaited since its last timely one
        self._in_vain_s = 0.0  # of drafting, since the last step that was counted
        self._launched_at = 0.0

    def start(self, request: Request) -> Drafting:
        """Return the initial state of a request's row."""
        speculation = request.speculation
        limit = speculation.num_speculative_tokens
        if not speculation.enabled or not self.policy.num_speculative_tokens:
            limit = 0
        elif limit is None:  # then the proposer sets a limit: see `attach`
            limit = MAX_SPECULATIVE_TOKENS
        sampled = request.sampling.temperature >= SAMPLED_TEMPERATURE
        return Drafting(Offered(limit, sampled))

    def attach(self, row: Row, proposer: DraftOffer, now: float) -> None:
        """Give a row to a proposer."""
        d, proposer_id = row.drafting, proposer.proposer_id
        self.learn([row])  # from the proposer before
        if proposer_id != d.proposer_id:
            d.breaker, d.measured = CircuitBreaker(), Measured()
            d.awaited = Awaited(since=now, last_block_at=now)
            d.awaited.commits.append(PastCommit(len(row.token_ids), now, proposer.requested))
            d.drafter = self._drafters.get(proposer_id or "", f"{proposer_id} ")
        d.offered = replace(d.offered, proposer=proposer)
        self._choose_counts([d])
        if not proposer.requested:
            d.num_draft_tokens, d.stance = 0, None  # until it goes into a step
        d.awaited.asked = d.num_draft_tokens > 0
        if proposer.colocated:  # it drafts before a step or not at all
            self.draft_nothing([row])

    def draft_nothing(self, rows: Iterable[Row]) -> None:
        """Note that no draft comes for rows before their next step: they wait for none."""
        for row in rows:
            row.drafting.awaited.no_guess_at = len(row.token_ids)

    def withhold(self, row: Row) -> None:
        """Ask for no first draft, as with so many requests as there are now none is of use.

        The proposer on the engine's thread would process the whole text for it.
        """
        d = row.drafting
        if d.proposer.colocated and not d.awaited.blocks:
            d.num_draft_tokens, d.stance = 0, None  # until it goes into a step

    def measure_no_delay(self, rows: Iterable[Row]) -> None:
        """Leave the delay of rows' next drafts out: others than the proposer make it longer."""
        for row in rows:
            commits = row.drafting.awaited.commits
            if commits:
                commits[-1] = commits[-1]._replace(measures=False)

    def blocks_arrived(self, blocks: Iterable[ArrivedBlock]) -> None:
        """Learn from blocks, and count the time that they took."""
        delays: dict[str, DraftTimes] = {}
        drafter, of = "", ("", "")
        for row, (_, tree, proposer_id, draft_us, _, method), fate, at in blocks:
            d, length, base_len = row.drafting, len(row.token_ids), tree.base_len
            awaited, num_tokens = d.awaited, len(tree.token_ids)
            awaited.blocks += 1
            if num_tokens:
                if of != (proposer_id, method):
                    of, drafter = (proposer_id, method), f"{proposer_id} {method}"
                    remember(self._drafters, proposer_id, drafter)
                if drafter != d.drafter:
                    self.learn([row])  # from the drafter before
                    d.drafter, d.stance = drafter, None
            if fate is USEFUL:
                if self._in_vain:
                    self._in_vain.pop(proposer_id, None)
                if d.breaker.deadline_misses or d.breaker.rounds_left:
                    d.breaker.close()
                if base_len < length:  # the guess was right, and late
                    d.round.wrong = False
            elif fate is BlockFate.WRONG:
                d.round.wrong = True
            elif base_len == length:  # an empty block
                awaited.no_guess_at = length
                d.breaker.deadline_misses = 0
            commit = _answered(awaited.commits, base_len)
            # No proposer drafted for longer than it was asked; without a commit, since its last
            # block. A guess may come before the commit that it meets.
            since = awaited.last_block_at if commit is None else commit.at
            passed_s = at - since if at > since else 0.0
            draft_s = draft_us * 1e-6  # as the proposer says
            if commit is not None and commit.measures and awaited.blocks > 1:
                # The first one took the prompt's time.
                if (times := delays.get(d.drafter)) is None:
                    delays[d.drafter] = times = self.policy.measured.draft_times(d)
                if num_tokens:  # however late: whether waiting pays is decided again
                    d.measured.worth_waiting = True
                alone, seconds = d.offered.proposer.colocated or self._launched_at < since, passed_s
                began, ended = awaited.in_vain
                if began == since:  # afterwards draft and step each went at half its speed
                    alone, seconds = True, (ended - began + passed_s) / 2
                times.observe(at, seconds, draft_s, num_tokens, alone=alone)
            if at > awaited.last_block_at:
                awaited.last_block_at = at
            if fate is not USEFUL and commit is not None and passed_s <= MAX_PATIENCE_S:
                self._in_vain.pop(proposer_id, None)
            propose_s = draft_s if draft_s < passed_s else passed_s
            if fate is not USEFUL and not d.offered.proposer.own_device:
                self._in_vain_s += propose_s
            network_s = 0.0 if commit is None else passed_s - propose_s
            self.account.arrived(row.counters, proposer_id, propose_s, network_s)

    def choose_rows(
        self, rows: Rows[R], num_prefilling: int, now: float, ready_rows: Rows[R] = ()
    ) -> Ready[R]:
        """Return which rows run now, of those that lack at most a draft.

        `ready_rows` lack none, and nothing is noted of them.
        """
        if not self.may_draft:
            return self.policy.choose_rows([*ready_rows, *rows], (), num_prefilling, now)
        ready: list[R] = [*ready_rows]
        waiting: list[R] = []
        may_wait, drafting = self.policy.may_wait, self.policy.drafting
        for row in rows:
            current, lacks_draft = row.drafting.round, False
            if row.draft is None:
                if rests(row, drafting=drafting):
                    if row.drafting.offered.limit:
                        current.looked_at = now
                    ready.append(row)
                    continue
                lacks_draft = _is_awaited(row)
            if current.looked_at is None:
                current.looked_at, current.at_hand = now, row.draft is not None
                patient = lacks_draft and not self._is_set_aside(row.drafting)
                patience_s = self.policy.patience_s(row) if patient else 0.0
                current.deadline = current.committed_at + patience_s if lacks_draft else now
            if not may_wait and current.committed_at < current.deadline:
                current.deadline = current.committed_at  # nothing is missed
            (waiting if lacks_draft and now < current.deadline else ready).append(row)
        return self.policy.choose_rows(ready, waiting, num_prefilling, now)

    def looked_at(self, rows: Rows[Row], now: float) -> None:
        """Note that rows without drafts were chosen before their last round had ended."""
        for row in rows if self.may_draft else ():
            if row.drafting.offered.limit:
                row.drafting.round.looked_at = now

    def chosen(self, rows: Iterable[tuple[Row, int]]) -> None:
        """Note that each row's draft was at hand if so many tokens of it were, 0 if none was."""
        for row, drafted in rows:
            row.drafting.round.at_hand = drafted > 0

    def cut(
        self, drafts: Rows[tuple[Row, DraftNodes]], num_rows: int, num_others: int
    ) -> list[list[bool]]:
        """Return which nodes of each draft at hand the next step verifies; see `Policy.cut`."""
        of_rows = [(row.drafting, nodes) for row, nodes in drafts]
        chosen = iter(self.policy.cut(of_rows, num_rows, num_others))
        return [list(islice(chosen, len(nodes.confidences))) for _, nodes in drafts]

    def verifies(self, row: Row, nodes: DraftNodes) -> None:
        """Note the nodes that a row's round verifies, if its draft told confidences."""
        row.drafting.round.nodes = nodes

    def launched(
        self, rows: Iterable[tuple[R, int]], now: float, undrafted: Rows[R] = ()
    ) -> list[R]:
        """Note that rows went into a step, each with so many draft tokens, or `undrafted`.

        Returns those whose circuit breaker opens: they awaited their proposers' drafts in vain.
        """
        self._launched_at = now
        if not self.may_draft:
            for row in chain(undrafted, [row for row, _ in rows]):
                row.counters.iter_count += 1
            return []
        drafting, opened, learning = self.policy.drafting, [], []
        resting: list[R] = []
        at_hand: list[R] = []
        for row, drafted in chain(zip(undrafted, repeat(0)), rows):
            current = row.drafting.round
            if not drafted and rests(row, drafting=drafting):
                resting.append(row)
                continue
            learning.append(row)
            if drafted and current.at_hand and current.looked_at is not None:
                at_hand.append(row)
            elif self._count_launch(row, drafted, now):
                opened.append(row)
        self.account.launched_at_rest(resting)
        self.account.launched_at_once(at_hand)
        for row in at_hand:
            d = row.drafting
            self._count_hit(row, wanted=d.num_draft_tokens > 0)
            if d.breaker.last_open_rounds or d.breaker.deadline_misses:
                d.breaker.close(verified=True)
        self._learn_and_choose(learning)
        return opened

    def _count_launch(self, row: Row, drafted: int, now: float) -> bool:
        d, current = row.drafting, row.drafting.round
        self.account.launched(row, drafted, now)
        if current.looked_at is None:  # it processed its prompt, and missed nothing
            return False
        wanted = _is_awaited(row) or (current.at_hand and d.num_draft_tokens > 0)
        self._count_hit(row, wanted=wanted)
        if drafted:
            d.breaker.close(verified=True)
            return False
        if row.draft is not None:  # there was a draft, which this step did not verify
            return False
        if current.committed_at < current.deadline <= now:
            d.awaited.in_vain = current.committed_at, now
        if d.breaker.rounds_left:
            d.breaker.rounds_left -= 1
            return False
        # A proposer from which nothing has come for long is missed, waited for or not.
        silent = not d.awaited.blocks and now > d.awaited.since + MAX_PATIENCE_S
        silent = silent or self._is_set_aside(d)
        if not wanted or not (current.deadline > current.committed_at or silent):
            return False
        proposer_id = d.proposer_id or ""
        remember(self._in_vain, proposer_id, self._in_vain.get(proposer_id, 0) + 1)
        return d.breaker.missed()

    def _is_set_aside(self, d: Drafting) -> bool:
        """Return whether a row without a block has a proposer that others awaited in vain."""
        return not d.awaited.blocks and self._in_vain.get(d.proposer_id or "", 0) >= MISSES_ALLOWED

    def _count_hit(self, row: Row, *, wanted: bool) -> None:
        """Count whether a round that `wanted` a draft had it at once."""
        d, measured = row.drafting, row.drafting.measured
        # What is left of a late draft is a hit only of a proposer that runs ahead: it means it so.
        hit = d.round.at_hand and (d.runs_ahead or row.draft_base == len(row.token_ids))
        before, measured.hit = measured.hit, hit if wanted else None
        if not wanted:
            return
        if before is not None:
            (row.counters.after_hit if before else row.counters.after_miss)[hit] += 1
        free = hit and not d.offered.proposer.colocated
        if free or measured.free_hits.mean:  # else it stays 0
            measured.free_hits.add(free)
        if before is False:
            measured.free_after_miss.add(free)

    def preempted(self, row: Row) -> None:
        """Note that a row lost its pages: it waits for no draft until it has them again."""
        row.drafting.round.looked_at = None
        row.drafting.round.nodes = NO_NODES
        self.account.preempted(row)

    def rounds_done(self, rows: Iterable[tuple[Row, Round, bool]], now: float) -> None:
        """Note commits of rows; True says that a row's draft fell off the committed path."""
        drafting = self.policy.drafting
        for row, round_, wrong in rows:
            d, num_drafted = row.drafting, round_.drafted
            if not (num_drafted or wrong) and rests(row, drafting=drafting):
                d.round = CurrentRound(now)  # `attach` and drafts to come begin the rest anew
                continue
            awaited, current = d.awaited, d.round
            resumes = current.looked_at is None or not awaited.asked  # no draft was to come before
            if resumes:
                awaited.since = now
            awaited.asked, nodes = d.num_draft_tokens > 0, current.nodes
            # The same object begins anew, in a fifth of the time of another.
            current.committed_at, current.looked_at, current.at_hand = now, None, False
            current.deadline, current.wrong, current.nodes = 0.0, wrong, NO_NODES
            # A proposer that resumes first catches up on all commits since it drafted last.
            measures = row.draft is None and not resumes
            length, commits = len(row.token_ids), awaited.commits
            if not commits or commits[-1].length != length:  # a stop token alone adds nothing
                commits.append(PastCommit(length, now, measures))
            whole = len(nodes.confidences) == num_drafted
            d.unlearned.append((round_, nodes if whole else NO_NODES))

    def undrafted_done(self, rows: Rows[Row], now: float) -> None:
        """Do what `rounds_done` does for rounds without drafts of rows that have none at hand."""
        drafting = self.policy.drafting
        for row in rows if self.may_draft else ():
            if not rests(row, drafting=drafting):
                self.rounds_done([(row, UNDRAFTED, False)], now)
            elif row.drafting.offered.limit:
                row.drafting.round = CurrentRound(now)
            else:
                row.drafting.round.committed_at = now

    def step_done(self, rows: Rows[Drafting], step: StepDone, *, decoded: bool) -> None:
        """Count a step of `rows`, and let the policy learn from it.

        What the rows' drafting tells of the step is filled in. `decoded` says that it processed no
        prompts.
        """
        draftable = [d for d in rows if d.offered.draftable] if self.may_draft else []
        draft_mode = "none"
        if draftable and self.policy.drafting:
            draft_mode = "ahead" if any(d.runs_ahead for d in draftable) else "on demand"
        self.account.step(step.tokens, step.num_rows, draft_mode, decoded=decoded)
        ids = frozenset([d.offered.proposer.proposer_id or "" for d in draftable])
        in_vain_s, self._in_vain_s = self._in_vain_s, 0.0
        self.policy.step_done(
            replace(
                step,
                comparable=step.comparable and bool(ids),
                proposer_ids=ids,
                in_vain_s=in_vain_s,
                answered=sum([d.awaited.blocks > 0 for d in draftable]) / max(1, len(draftable)),
            )
        )

    def learn(self, rows: Rows[Row]) -> None:
        """Take in what rows' rounds showed since they were last learned."""
        self._learn([row.drafting for row in rows])

    def _learn(self, rows: Rows[Drafting]) -> None:
        rounds = [(d, d.unlearned) for d in rows]
        self.policy.measured.acceptance.observe(rounds)
        for _, unlearned in rounds:
            unlearned.clear()

    def _learn_and_choose(self, rows: Rows[Row]) -> None:
        """Learn from rows, and choose how many tokens they draft in the round after the next.

        That is when they go into a step: before it the device or the proposer would wait for this.
        Several rounds take the host little longer than one, so they are taken together, unless the
        policy would choose by other rules by now, or a row has another drafter.
        """
        drafting = [d for row in rows if (d := row.drafting).unlearned or d.stance is None]
        rounds = [len(d.unlearned) for d in drafting]
        enough = sum(rounds) >= ROUNDS_AT_ONCE and max(rounds) >= OF_A_ROW
        if enough or [d.stance for d in drafting].count(self.policy.stance) < len(drafting):
            self._learn(drafting)
            self._choose_counts(drafting)

    def _choose_counts(self, rows: Rows[Drafting]) -> None:
        """Choose how rows come to their next drafts, and how long these are."""
        if rows:
            stance = self.policy.stance
            for d in rows:
                d.runs_ahead, d.stance = d.proposer.runs_ahead, stance
            for d, count in zip(rows, self.policy.choose_counts(rows), strict=True):
                d.num_draft_tokens = min(count, d.offered.max_draft_tokens)


def _is_awaited(row: Row) -> bool:
    """Return whether a row waits for a draft, and its proposer has not said that it has none."""
    d = row.drafting
    return d.waits and d.awaited.no_guess_at != len(row.token_ids)


def _answered(commits: deque[PastCommit], base_len: int) -> PastCommit | None:
    """Return the commit that a block from `base_len` on answers, if any."""
    if commits and commits[-1].length == base_len:  # as most do; older ones stay unanswered
        return commits.pop()
    for back, commit in enumerate(reversed(commits), start=1):
        if commit.length <= base_len:
            if commit.length < base_len:  # it is made ahead, or answers what was answered
                return None
            del commits[-back]  # a second block for the same commit measures nothing
            return commit
    return None
