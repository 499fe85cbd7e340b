"""Draft with an independent small language model, over its own paged cache.

A round is one catch-up forward, which feeds every session the committed tokens that its cache
lacks, then num_draft_tokens - 1 forwards of one token per session. Nothing is rolled back: wrong
guesses in the cache are overwritten. The last token of a draft is fed once it is accepted.

With a `ForkDrafter` a draft comes with the likeliest other tokens at each place, and while the
scorer verifies it, branches are drafted for the likeliest outcomes (`ahead.outcomes`). The branch
that comes true is the next draft, and its pages are the session's.

Tokens are drawn with the session's own sampling parameters and noise at their absolute positions
(`engine.sampling`), so a draft equals the target's choice wherever the models are close enough.
Under rejection they are drawn with noise of their own, and go with their distributions. Such a
session gets no branches, nor does one whose drafts are masked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from outrider.draft_port import DeviceDrafts, StepStates
from outrider.draft_tree import DraftProbs, DraftTree
from outrider.drafting.ahead.outcomes import Outcomes
from outrider.drafting.async_drafts import AsyncDrafts, AsyncRow
from outrider.drafting.draft_model.brancher import Brancher
from outrider.drafting.draft_model.session import SHORT, DraftRow, DraftState
from outrider.drafting.drafters import AsyncDrafter, Chain, ChainDrafter, ForkDrafter
from outrider.drafting.graphs.chains import draft_chains, sample_chains
from outrider.drafting.masks import DraftMasks, open_mask
from outrider.drafting.proposer import (
    DEFAULT_LIMITS,
    NO_PACE,
    DraftRound,
    Follower,
    Pace,
    ProposerLimits,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.drafting.sessions import SessionMethod
from outrider.engine.batch import Model
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.errors import ConfigError


class DraftModelProposer(SessionMethod[DraftState]):
    """Drafts with `model`, whose page pool it owns. Raises `ConfigError` for a pool too small."""

    def __init__(
        self,
        model: Model,
        *,
        name: str,
        limits: ProposerLimits = DEFAULT_LIMITS,
        chain_drafter: ChainDrafter | None = None,
        fork_drafter: ForkDrafter | None = None,
        masks: DraftMasks | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        room = model.num_pages * model.page_size
        longest = min(model.max_model_len, limits.max_model_len or model.max_model_len)
        if room < min(longest, 64):
            raise ConfigError(
                f"{model.num_pages} pages of {model.page_size} tokens hold no session of use: "
                "give the draft model more KV-cache memory."
            )
        super().__init__(
            ProposerTraits(
                method="draft_model",
                model=name,
                vocab_size=model.vocab_size,
                max_sessions=limits.max_sessions,
                max_draft_tokens=limits.max_draft_tokens,
                max_model_len=min(longest, room),
                runs_ahead=fork_drafter is not None and limits.max_branches > 0,
            ),
            clock,
        )
        self._model = model
        self._page_size = model.page_size
        self._pool = BlockPool(model.num_pages)
        self._prefill_budget = limits.prefill_budget
        self._chain_drafter = chain_drafter
        self._masks = masks
        self._outcomes = Outcomes()
        self._unpublished: dict[DraftState, None] = {}  # drafted for since there was time
        self._put_off = False  # prompts, in the last round
        self._async_drafts: AsyncDrafts[DraftState, Chain] | None = None
        if isinstance(chain_drafter, AsyncDrafter):
            self._async_drafts = AsyncDrafts(chain_drafter, DraftState.continues)
        self._brancher: Brancher | None = None
        if fork_drafter is not None and limits.max_branches > 0:
            self._brancher = Brancher(
                fork_drafter,
                self._pool,
                self._outcomes,
                max_branches=limits.max_branches,
                max_model_len=self.traits.max_model_len,
                clock=clock,
            )

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        done = DraftRound()
        states = self._asked(sessions)
        self._unpublished.update(dict.fromkeys(states))
        if self._async_drafts is not None:
            drafts = self._async_drafts.take(states)
            for state, (chain, _) in drafts.items():
                done.drafts.append((state.key, state.take_async(self._pool, chain)))
            states = [state for state in states if state not in drafts]
        rows = self._plan(states, done)
        if rows:
            done = replace(done, forward_s=self._run(rows, done, pace))
        done.lost.extend(self._take_lost())  # last: if a forward fails, the next round reports it
        return done

    def launch_after_verify(
        self,
        rows: Sequence[AsyncRow],
        verify_output: Tensor,
        states: StepStates | None = None,  # noqa: ARG002
    ) -> Sequence[int]:
        """Implement `AsyncProposer`."""
        if self._async_drafts is None:
            return ()
        launched = [
            (state, row.place, fed)
            for row in rows
            if (state := self._sessions.get(row.session)) is not None
            and (fed := state.input_behind(row, self._pool, self._page_size)) is not None
        ]
        self._async_drafts.launch(launched, len(rows), verify_output)
        return ()

    def device_drafts(self, sessions: Sequence[SessionKey]) -> DeviceDrafts | None:
        """Implement `AsyncProposer`."""
        states = [state for key in sessions if (state := self._sessions.get(key)) is not None]
        if self._async_drafts is None or len(states) < len(sessions):
            return None
        return self._async_drafts.on_device(states, lambda state: state.patient)

    @property
    def launched_drafts(self) -> DeviceDrafts | None:
        """Implement `AsyncProposer`."""
        return None if self._async_drafts is None else self._async_drafts.launched

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        if self._brancher is None:
            self._publish()
            return DraftRound()
        started = self._clock()
        states = [self._sessions[session] for session in sessions if session in self._sessions]
        trees = self._brancher.branch(states, pace)
        if not trees:
            self._publish()
        loops = self._brancher.take_loops()
        return DraftRound(trees=trees, forward_s=self._clock() - started, loops=loops)

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless pages and sessions agree."""
        states = self._sessions.values()
        branches = [branch.pages for state in states for branch in state.ahead.branches.values()]
        self._pool.check_invariants([*(state.block_table for state in states), *branches])
        for state in states:
            room = len(state.block_table) * self._page_size
            assert state.computed + state.ahead.num_fed <= room
            assert state.computed <= len(state.follower.tokens)

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> DraftState:
        self._publish()
        state = DraftState(key, follower, start, open_mask(self._masks, start))
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
        """Share the pages drafted for since, in spare time or before somebody looks for them."""
        for state in self._unpublished:
            state.publish(self._pool, state.follower.tokens, self._page_size)
        self._unpublished.clear()

    def _run(self, rows: list[DraftRow], done: DraftRound, pace: Pace) -> float:
        """Feed and draft; return how long it took."""
        started = self._clock()
        forked = [row for row in rows if row.num_forked]
        sampled = [row for row in rows if row.sampled]
        others = [row for row in rows if not row.num_forked and not row.sampled]
        if forked:
            assert self._brancher is not None
            at_hand = [self._sessions[session] for session in done.at_hand]
            pairs = [(row.state, row.slice()) for row in forked]
            trees = self._brancher.draft(pairs, forked[0].num_forked, at_hand, pace)
            done.trees.extend(trees)
            done.loops.extend(self._brancher.take_loops())
        chains = [
            (row.state.ahead.guess[: row.wanted], row.state.ahead.confidences[: row.wanted])
            for row in forked
        ]
        drafts: list[tuple[list[int], Sequence[DraftProbs | None], bytes]]
        drafts = [
            (chain, (), confidences) for chain, confidences in [*chains, *self._run_chains(others)]
        ]
        if sampled:
            inputs = [row.input() for row in sampled]
            drafts += [(*drawn, b"") for drawn in sample_chains(self._model, inputs)]
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
            chain, probs, confidences = next(drafted)
            if not row.num_forked:
                state.ahead.guess = chain[:-1]  # the last token was never fed
            tree = DraftTree.chain(end, chain, probs, confidences)
            done.drafts.append((state.key, state.push(tree)))
        return forward_s

    def _plan(self, states: Sequence[DraftState], done: DraftRound) -> list[DraftRow]:
        """Return the rows of a round, their pages reserved; most drafts wanted first."""
        budget = self._prefill_budget
        rows: list[DraftRow] = []
        others_drafted = bool(done.drafts)  # behind a step
        for state in states:
            wanted = state.follower.wanted
            if state.at_hand:
                state.hit = True
                done.at_hand.append(state.key)
                continue
            if wanted == 0:
                done.drafts.append((state.key, DraftTree.chain(state.follower.length, ())))
                continue
            missing = state.give_up_guesses(self._pool)
            unfinished, left_out = False, others_drafted
            if missing > SHORT:
                missing, whole = min(missing, budget), missing
                budget -= missing
                unfinished = missing < whole
                left_out = left_out or any(other.past_prompt for other in self._sessions.values())
            # A draft of its own would delay others, so the next one is made with theirs.
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
                replace(row, num_forked=longest) if row.can_fork(longest, limit) else row
                for row in rows
            ]
        return [row for row in rows if self._reserve(row)]

    def _put_off_prompts(self, rows: list[DraftRow], done: DraftRound) -> list[DraftRow]:
        """Leave out the prompts for one round, if others only wait for a draft.

        These have it sooner, and while it is verified the prompts are processed.
        """
        short = [row for row in rows if row.short]
        self._put_off = 0 < len(short) < len(rows) and not self._put_off
        if not self._put_off:
            return rows
        done.unfinished.extend([row.state.key for row in rows if not row.short])
        return short

    def _reserve(self, row: DraftRow) -> bool:
        """Reserve pages for the text and what the round writes past it.

        Branches and idle sessions give way. Without pages the session is lost before any of its
        prompt is processed.
        """
        length = len(row.state.follower.tokens)
        num_tokens = length + (row.num_forked or max(row.wanted - 1, 0))
        while not row.state.cover(self._pool, num_tokens, self._page_size):
            dropped = [each.ahead.drop_branches(self._pool) for each in self._sessions.values()]
            if not any(dropped) and not self._makes_room(row.state.key):
                return False
        return True

    def _run_chains(self, rows: list[DraftRow]) -> list[Chain]:
        """Feed rows, those that want drafts first, and return the drafts."""
        fast = self._chain_drafter
        inputs = [row.input() for row in rows]
        ready = [row for row in inputs if row.wanted]
        num_tokens = sum([len(row.slice.token_ids) for row in ready])
        chains: list[Chain] = []
        masked = any(row.mask is not None for row in ready)
        if fast and ready and num_tokens <= fast.max_tokens and not masked:
            chains = fast.draft(ready)
            ready, inputs = [], inputs[len(ready) :]
        if inputs and (ready or not (fast and fast.feed([row.slice for row in inputs]))):
            chains += draft_chains(self._model, inputs, with_confidences=True)
        return chains
