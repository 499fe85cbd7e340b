"""An independent small language model that drafts, batched over sessions, over its own paged cache.

A round is one catch-up forward, which feeds every session the committed tokens that its cache
lacks, then num_draft_tokens - 1 forwards of one token per session. Nothing is rolled back: what the
cache holds is compared with what was committed, and what differs is overwritten. After a fully
accepted draft the last drafted token was never fed, so it is among the tokens to catch up.

With a `ForkDrafter` it runs ahead: a draft comes with the likeliest other tokens at each place, and
while the scorer verifies it, branches are drafted for the likeliest outcomes (branch_plan.py). The
branch that comes true is the next draft, and its pages are the session's: only branches are drafted
until an outcome is missed. The last token of a draft is not fed before it is sent. When branches
are on their way it is, if there is time: what may come after them is known then.

Tokens are drawn with the session's own sampling parameters and noise at their absolute positions
(`engine.sampling`), so a draft equals the target's choice wherever the models are close enough.
For a session that rejection verifies they are drawn with noise that the scorer does not use, and
go with the distributions that they came from; such a session gets no branches. Neither does one
whose drafts are masked by its constraint (draft_mask.py): what is drawn must come to the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from outrider.draft_port import DeviceDrafts
from outrider.draft_tree import DraftProbs, DraftTree
from outrider.drafting.ahead.brancher import Brancher
from outrider.drafting.ahead.branches import ForkDrafter
from outrider.drafting.ahead.outcomes import NO_PACE, Outcomes, Pace
from outrider.drafting.draft_model.async_drafts import (
    AsyncDrafter,
    AsyncDrafts,
    AsyncRow,
    may_launch_after_verify,
)
from outrider.drafting.draft_model.chains import ChainDrafter, draft_chains, sample_chains
from outrider.drafting.draft_model.masks import DraftMasks, open_mask
from outrider.drafting.draft_model.session import DraftRow, DraftState
from outrider.drafting.proposer import (
    DraftRound,
    Follower,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.drafting.sessions import SessionMethod
from outrider.engine.batch import Model
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.errors import ConfigError

_SHORT = 16
"""Tokens to catch up that never wait for the prefill budget: what a round or two committed."""


class DraftModelProposer(SessionMethod[DraftState]):
    """Drafts with `model`, whose page pool it owns. Raises `ConfigError` for a pool too small.

    `prefill_budget` bounds the prompt tokens processed in one call of `draft`, so that a long
    prompt does not hold up the other sessions' drafts.
    """

    def __init__(
        self,
        model: Model,
        *,
        name: str,
        max_sessions: int = 256,
        max_draft_tokens: int = 16,
        prefill_budget: int = 256,
        chain_drafter: ChainDrafter | None = None,
        fork_drafter: ForkDrafter | None = None,
        max_branches: int = 16,
        masks: DraftMasks | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if max_sessions < 1 or max_draft_tokens < 1 or prefill_budget < 1:
            raise ConfigError("max_sessions, max_draft_tokens and prefill_budget are at least 1.")
        room = model.num_pages * model.page_size
        if room < min(model.max_model_len, 64):
            raise ConfigError(
                f"{model.num_pages} pages of {model.page_size} tokens hold no session of use: "
                "give the draft model more KV-cache memory."
            )
        super().__init__(
            ProposerTraits(
                method="draft_model",
                model=name,
                vocab_size=model.vocab_size,
                max_sessions=max_sessions,
                max_draft_tokens=max_draft_tokens,
                max_model_len=min(model.max_model_len, room),
                runs_ahead=fork_drafter is not None and max_branches > 0,
            ),
            clock,
        )
        self._model = model
        self._page_size = model.page_size
        self._pool = BlockPool(model.num_pages)
        self._prefill_budget = prefill_budget
        self._chain_drafter = chain_drafter
        self._masks = masks
        self._outcomes = Outcomes()
        self._unpublished: dict[DraftState, None] = {}  # drafted for since there was time
        self._put_off = False  # prompts, in the last round
        self._trails: AsyncDrafts | None = None
        if isinstance(chain_drafter, AsyncDrafter):
            self._trails = AsyncDrafts(chain_drafter, self._pool)
        self._brancher: Brancher | None = None
        if fork_drafter is not None and max_branches > 0:
            self._brancher = Brancher(
                fork_drafter,
                self._pool,
                self._outcomes,
                max_branches=max_branches,
                max_model_len=self.traits.max_model_len,
                clock=clock,
            )

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        done = DraftRound()
        if self._trails is not None and self._trails.launched:
            drafts = self._trails.take(self._asked(sessions))
            done.drafts.extend([(state.key, tree) for state, tree in drafts.items()])
            self._unpublished.update(dict.fromkeys(drafts))
            drafted = {state.key for state in drafts}
            sessions = [session for session in sessions if session not in drafted]
        rows = self._plan(sessions, done)
        if rows:
            done = replace(done, forward_s=self._run(rows, done, pace))
        done.lost.extend(self._take_lost())  # at last: if a forward fails, the next round says it
        return done

    def launch_after_verify(self, rows: Sequence[AsyncRow], verify_output: Tensor) -> None:
        """Implement `AsyncProposer`."""
        if self._trails is None:
            return
        self._trails.take(())  # nobody asked for those behind the step before
        trailing = [
            (state, row)
            for row in rows
            if (state := self._sessions.get(row.session)) is not None
            and may_launch_after_verify(state, row)
        ]
        # A few would cost nearly as much as all.
        if 0 < len(rows) <= 2 * len(trailing):
            self._trails.launch(trailing, verify_output, self._page_size)

    def can_launch_after_verify(self, sessions: Sequence[SessionKey]) -> DeviceDrafts | None:
        """Implement `AsyncProposer`."""
        states = [state for key in sessions if (state := self._sessions.get(key)) is not None]
        if self._trails is None or len(states) < len(sessions):
            return None
        return self._trails.late(states)

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        if self._brancher is None:
            self._publish()
            return DraftRound()
        started = self._clock()
        states = [self._sessions[session] for session in sessions if session in self._sessions]
        branched = self._brancher.branch(states, pace)
        if not branched:
            self._brancher.lengthen(states)
            self._publish()
        trees = [(state.key, state.push_tree()) for state in branched]
        return DraftRound(trees=trees, forward_s=self._clock() - started)

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless pages and sessions agree."""
        states = self._sessions.values()
        branches = [branch.pages for state in states for branch in state.ahead.branches]
        self._pool.check_invariants([*(state.block_table for state in states), *branches])
        for state in states:
            room = len(state.block_table) * self._page_size
            assert state.computed + len(state.ahead.line) <= room
            assert state.computed <= len(state.follower.tokens)

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> DraftState:
        self._publish()
        mask = open_mask(self._masks, start)
        state = DraftState(key, follower, mask, samples=start.samples, once=start.once)
        state.adopt(self._pool, follower.tokens, self._page_size)
        return state

    def _follow(self, state: DraftState, fresh: Sequence[int]) -> None:
        if fresh:
            state.follow(self._pool, fresh, self._outcomes)
        elif state.follower.silent:
            self._release(state)

    def _release(self, state: DraftState) -> None:
        state.publish(self._pool, state.follower.tokens, self._page_size)
        state.drop(self._pool)

    def _publish(self) -> None:
        """Shares what was drafted for since: in spare time, or before somebody looks for it."""
        for state in self._unpublished:
            state.publish(self._pool, state.follower.tokens, self._page_size)
        self._unpublished.clear()

    def _run(self, rows: list[DraftRow], done: DraftRound, pace: Pace) -> float:
        """Feed and drafts; returns how long it took."""
        started = self._clock()
        forked: list[DraftRow] = []
        sampled: list[DraftRow] = []
        others: list[DraftRow] = []
        for row in rows:
            (forked if row.num_forked else sampled if row.sampled else others).append(row)
        if forked:
            assert self._brancher is not None
            at_hand = [self._sessions[session] for session in done.at_hand]
            branched = self._brancher.draft(forked, at_hand, pace)
            done.trees.extend([(state.key, state.push_tree()) for state in branched])
        chains = [row.state.ahead.guess[: row.wanted] for row in forked] + self._run_chains(others)
        drafts: list[tuple[list[int], Sequence[DraftProbs | None]]]
        drafts = [(chain, ()) for chain in chains]
        if sampled:
            slices, ready = [row.slice() for row in sampled], [row.ready() for row in sampled]
            drafts += sample_chains(self._model, slices, ready)
        forward_s = self._clock() - started
        drafted = iter(drafts)
        for row in (*forked, *others, *sampled):
            state, end = row.state, row.end
            state.computed = end
            if end < len(state.follower.tokens):
                done.unfinished.append(state.key)
                continue
            state.patient = False
            if row.wanted == 0:
                done.drafts.append((state.key, DraftTree.chain(end, ())))
                continue
            chain, probs = next(drafted)
            if not row.num_forked:
                state.ahead.line = chain[:-1]  # the last token was never fed
            done.drafts.append((state.key, state.push(DraftTree.chain(end, chain, probs))))
        return forward_s

    def _plan(self, sessions: Sequence[SessionKey], done: DraftRound) -> list[DraftRow]:
        """Who takes part with how many tokens, their pages reserved; most drafts wanted first."""
        budget = self._prefill_budget
        rows: list[DraftRow] = []
        others_drafted = bool(done.drafts)  # behind a step
        states = self._asked(sessions)
        self._unpublished.update(dict.fromkeys(states))
        for state in states:
            wanted = state.follower.wanted
            if state.at_hand:
                state.hit = True
                done.at_hand.append(state.key)
                continue
            if wanted == 0:
                done.drafts.append((state.key, DraftTree.chain(state.follower.length, ())))
                continue
            missing = state.settle(self._pool)
            unfinished, left_out = False, others_drafted
            if missing > _SHORT:
                missing, whole = min(missing, budget), missing
                budget -= missing
                unfinished = missing < whole
                left_out = left_out or any(map(_follows, self._sessions.values()))
            # A draft of its own would hold others up: the next one is made with theirs.
            wanted = 0 if unfinished or (left_out and state.patient) else wanted
            if missing == 0:
                done.unfinished.append(state.key)
            else:
                rows.append(DraftRow(state, state.computed, state.computed + missing, wanted))
        rows = self._put_off_prompts(rows, done)
        rows.sort(key=lambda row: -row.wanted)
        if self._brancher is not None and rows:
            # All chains with candidates are drafted together, to one length.
            longest, limit = rows[0].wanted, self.traits.max_model_len
            rows = [
                DraftRow(row.state, row.start, row.end, row.wanted, longest)
                if row.wanted
                and row.num_tokens <= _SHORT
                and row.end + longest <= limit
                and not row.state.samples
                and row.state.mask is None
                else row
                for row in rows
            ]
        return [row for row in rows if self._reserve(row)]

    def _put_off_prompts(self, rows: list[DraftRow], done: DraftRound) -> list[DraftRow]:
        """Without the prompts, if others only wait for a draft: these have it sooner, and while it
        is verified the prompts are processed. For one round.
        """
        short = [row for row in rows if row.num_tokens <= _SHORT]
        self._put_off = 0 < len(short) < len(rows) and not self._put_off
        if not self._put_off:
            return rows
        done.unfinished.extend([row.state.key for row in rows if row.num_tokens > _SHORT])
        return short

    def _reserve(self, row: DraftRow) -> bool:
        """Pages for the text and what the round writes past it, at the cost of branches and of idle
        sessions; without them the session is lost, before any of its prompt is processed.
        """
        length = len(row.state.follower.tokens)
        num_tokens = length + max((row.num_forked or row.wanted) - 1, 0)
        while not row.state.cover(self._pool, num_tokens, self._page_size):
            if not self._drop_branches() and not self._makes_room(row.state.key):
                return False
        return True

    def _drop_branches(self) -> bool:
        """Whether there were any: their pages are free."""
        dropped = [state.ahead.drop_branches(self._pool) for state in self._sessions.values()]
        return any(dropped)

    def _run_chains(self, rows: list[DraftRow]) -> list[list[int]]:
        slices = [row.slice() for row in rows]
        ready = [row.ready() for row in rows if row.wanted]
        fast = self._chain_drafter
        chains: list[list[int]] = []
        num_tokens = sum([len(row.token_ids) for row in slices[: len(ready)]])
        masked = any(row.mask is not None for row in ready)
        if fast and ready and num_tokens <= fast.max_tokens and not masked:
            chains = fast.draft(slices[: len(ready)], ready)
            slices, ready = slices[len(ready) :], []
        if slices and (ready or not (fast and fast.feed(slices))):
            chains += draft_chains(self._model, slices, ready)
        return chains


def _follows(state: DraftState) -> bool:
    """Whether a session is past its prompt, and drafted for round by round."""
    return state.follower.wanted > 0 and len(state.follower.tokens) - state.computed <= _SHORT
