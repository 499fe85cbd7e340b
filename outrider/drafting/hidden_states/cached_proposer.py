"""Draft with a module that reads the target's hidden states and keeps keys and values.

A round feeds the rows that became true since the last (`heads.base`), with the target's states.
EAGLE, EAGLE-3 and MTP then feed a few rows per session with the module's own, in several forwards
(`grow_trees`); block drafters guess all tokens in one (`heads.block`). Under rejection and within a
constraint the drafts are chains. Rows of guesses leave keys and values behind that the next round
overwrites: accepted tokens are fed again with true states. Sessions of a round share its forwards,
and long prompts take several rounds.

The method does not draft ahead: the target has not computed the states that it would draft from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from outrider.draft_port import DeviceDrafts, StepStates
from outrider.draft_tree import DraftTree
from outrider.drafting.async_drafts import AsyncDrafts, AsyncRow
from outrider.drafting.drafters import DraftInput, StatesBehind
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.earlier_text import WINDOW
from outrider.drafting.hidden_states.forward import LEAD
from outrider.drafting.hidden_states.session import FeatureMethod, FeatureSession
from outrider.drafting.hidden_states.trees import max_trees
from outrider.drafting.masks import DraftMasks
from outrider.drafting.proposer import (
    NO_PACE,
    DraftRound,
    Follower,
    Pace,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.sampling.constraint import ConstraintEditor

_SHORT = 16
"""Rows that never wait for the prefill budget: those of a round or two."""

_PART = 256
"""Rows that are worth a forward while more of the prompt are to come: few take as long."""


@dataclass(frozen=True, slots=True)
class _HeadRow:
    """A session's part in one round."""

    state: FeatureSession
    num_rows: int  # true rows fed
    wanted: int  # draft tokens; 0: the prompt is not through yet
    mask: ConstraintEditor | None  # stands after the committed text; used up
    chain: bool  # the draft has one path
    num_guessed: int  # rows fed past the true ones at most
    left_out: bool = False  # it is fed whole, and gets no draft now

    @property
    def end(self) -> int:
        return self.state.cache.computed + self.num_rows

    @property
    def sampled(self) -> bool:
        """The draft is drawn with noise of its own."""
        return self.state.samples and self.wanted > 0

    @property
    def length(self) -> int:
        return self.state.follower.length

    def input(self, *, with_text: bool = False) -> DraftInput:
        cache, follower = self.state.cache, self.state.follower
        start = cache.computed
        tokens = follower.tokens[start + 1 : self.end + 1]
        is_tree = self.wanted > 0 and not self.chain
        return DraftInput(
            RowSlice(tokens, start, cache.block_table, 1),
            self.wanted,
            follower.draft_sampling,
            self.mask,
            self.state.rows(start, self.end),
            follower.tokens[-WINDOW:] if with_text and is_tree else (),
        )


class CachedHeadProposer(FeatureMethod):
    """Drafts with a `CachedDrafter`, batched over sessions: chains, or trees if it is wide."""

    def __init__(
        self, drafter: CachedDrafter, *, method: str, name: str, masks: DraftMasks | None = None
    ) -> None:
        head, limits = drafter.head, drafter.limits
        super().__init__(
            ProposerTraits(
                method=method,
                model=name,
                vocab_size=head.vocab_size,
                max_sessions=limits.max_sessions,
                max_draft_tokens=drafter.max_draft_tokens,
                max_model_len=drafter.max_model_len,
                features=head.features,
            ),
            masks,
        )
        self._drafter = drafter
        self._page_size = drafter.page_size
        self._pool = BlockPool(drafter.num_pages)
        self._prefill_budget = limits.prefill_budget
        self._tree_width = limits.tree_width
        self._at_once = max_trees(limits.tree_width, head.vocab_size)
        self._async_drafts = AsyncDrafts(drafter, _continues)

    @property
    def projection(self) -> bytes:
        return self._drafter.head.projection

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        done = DraftRound()
        states = self._asked(sessions)
        guesses = self._async_drafts.take(states)
        for state, guess in guesses.items():
            length = len(state.follower.tokens)
            done.drafts.append((state.key, guess.tree(length)))
            state.patient = False
            state.skip(length - 1)  # the loop read its rows on the device
            self._fed(state, length - 1)
        others = [state for state in states if state not in guesses]
        rows = self._plan(others, done, beside_drafts=bool(guesses))
        if rows:
            done = replace(done, forward_s=self._run(rows, done))
        done.lost.extend(self._take_lost())  # last: if a forward fails, the next round reports it
        return done

    def launch_after_verify(
        self, rows: Sequence[AsyncRow], verify_output: Tensor, states: StepStates | None = None
    ) -> Sequence[int]:
        """Implement `AsyncProposer`."""
        if states is None:
            self._async_drafts.launch((), len(rows), verify_output)
            return ()
        most, chain = max([row.wanted for row in rows], default=0), self._tree_width == 1
        # Most rows of a round want the same.
        num_fed = cache(lambda wanted: self._drafter.num_fed(wanted, most, chain=chain))
        launched: list[tuple[FeatureSession, int, DraftInput]] = []
        numbers: list[int] = []
        for key, place, max_accepted, wanted, _, number in rows:
            state = self._sessions.get(key)
            if state is None or number is None:
                continue
            pages, follower, num_rows = state.cache, state.follower, max_accepted + 1
            start = len(follower.tokens) - 1
            if (
                start >= 1
                and pages.computed == start == states.starts[number]
                and states.counts[number] >= num_rows
                and state.mask is None
                and not state.samples
                and pages.cover(self._pool, start + num_rows + num_fed(wanted), self._page_size)
            ):
                places = RowSlice((0,) * num_rows, start, pages.block_table, 1)
                launched.append((state, place, DraftInput(places, wanted, follower.sampling)))
                numbers.append(number)
        behind = StatesBehind(states.rows, [states.places[number] for number in numbers])
        read = self._async_drafts.launch(launched, len(rows), verify_output, behind)
        return numbers if read else ()

    def device_drafts(self, sessions: Sequence[SessionKey]) -> DeviceDrafts | None:
        """Implement `AsyncProposer`."""
        states = [state for key in sessions if (state := self._sessions.get(key)) is not None]
        if len(states) < len(sessions):
            return None
        return self._async_drafts.on_device(states, _is_left_out)

    @property
    def launched_drafts(self) -> DeviceDrafts | None:
        """Implement `AsyncProposer`."""
        return self._async_drafts.launched

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:  # noqa: ARG002
        """Feed rows of sessions that another method drafts for.

        These rows would pile up otherwise, and the first draft would have to wait for all of them.
        """
        if rows := self._plan_unasked():
            self._run(rows, DraftRound())
        return DraftRound()

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless pages, rows and sessions agree."""
        states = self._sessions.values()
        self._pool.check_invariants([state.cache.block_table for state in states])
        for state in states:
            cache = state.cache
            assert cache.computed <= len(cache.block_table) * self._page_size
            assert cache.computed <= max(0, len(state.follower.tokens) - 1)
            assert state.first <= cache.computed or state.first == state.end

    def _run(self, rows: list[_HeadRow], done: DraftRound) -> float:
        """Feed and draft; return how long it took."""
        started = time.perf_counter()
        # Of all of these the first rows are those that a draft is wanted for.
        trees = [row for row in rows if not row.chain]
        chains = [row for row in rows if row.chain and not row.sampled]
        sampled = [row for row in rows if row.sampled]
        parts = [trees[i : i + self._at_once] for i in range(0, len(trees), self._at_once)]
        with_text = self._drafter.follows_text
        for part in (*parts, chains):
            inputs = [row.input(with_text=with_text) for row in part]
            guesses = self._drafter.drafts(inputs) if part else []
            for row, guess in zip(part, guesses, strict=False):
                done.drafts.append((row.state.key, guess.tree(row.length)))
        if sampled:
            drawn_from = self._drafter.sampled_chains([row.input() for row in sampled])
            for row, (chain, probs) in zip(sampled, drawn_from, strict=True):
                done.drafts.append((row.state.key, DraftTree.chain(row.length, chain, probs)))
        forward_s = time.perf_counter() - started
        for row in rows:
            self._fed(row.state, row.end)
            if row.left_out:
                done.drafts.append((row.state.key, DraftTree.chain(row.length, ())))
            elif row.wanted == 0:
                done.unfinished.append(row.state.key)
                continue
            row.state.patient = False
        return forward_s

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> FeatureSession:
        state = super()._begin(key, follower, start)
        state.cache.adopt(self._pool, follower.tokens, self._page_size)
        return state

    def _fed(self, state: FeatureSession, end: int) -> None:
        """Note that the cache has the rows of positions below `end`."""
        state.cache.computed = end
        state.cache.publish(self._pool, state.follower.tokens, self._page_size)
        self._used(state)

    def _used(self, state: FeatureSession) -> None:
        # The last row is fed again if another draft is asked for.
        state.forget(min(state.cache.computed, max(0, len(state.follower.tokens) - 2)))

    def _release(self, state: FeatureSession) -> None:
        super()._release(state)
        state.cache.drop(self._pool)

    def _plan(
        self, asked: list[FeatureSession], done: DraftRound, *, beside_drafts: bool
    ) -> list[_HeadRow]:
        """Return the rows of a round, their pages reserved; most drafts wanted first.

        Beside drafts that were made behind a step some are fed and not drafted for: that would
        delay the others, so their next drafts are made with these.
        """
        budget = self._prefill_budget
        # The trees of a round grow together: each reserves what the largest may take.
        num_nodes = max([state.follower.wanted for state in asked], default=0)
        rows: list[_HeadRow] = []
        for state in asked:
            cache, length = state.cache, state.follower.length
            wanted = state.follower.wanted
            read = state.first > length - LEAD  # on the device: the draft was made of these states
            if wanted == 0 or length < LEAD or read:
                done.drafts.append((state.key, DraftTree.chain(length, ())))
                continue
            cache.computed = min(cache.computed, length - LEAD)
            fresh = 0 if _lacks_rows(state) else max(0, state.num_fresh)
            missing = fresh if fresh <= _SHORT else min(fresh, budget)
            if fresh > _SHORT:
                budget -= missing
            if missing < fresh or not state.ready:
                wanted = 0
            left_out = beside_drafts and wanted > 0 and _is_left_out(state)
            row = self._row(state, missing, 0 if left_out else wanted, num_nodes)
            rows.append(replace(row, left_out=left_out))
        rows.sort(key=lambda row: -row.wanted)
        rows = [row for row in rows if self._reserve_text(row)]
        done.unfinished.extend([row.state.key for row in rows if not row.num_rows])
        return [row for row in rows if row.num_rows]

    def _plan_unasked(self) -> list[_HeadRow]:
        """Return rows that are worth a forward, any if many are held, as far as there are pages."""
        least = _SHORT if self.holds_many else _PART
        budget = self._prefill_budget
        rows: list[_HeadRow] = []
        for state in self._sessions.values():
            if state.end - state.cache.computed < least or not budget:  # as mostly
                continue
            if (fresh := state.num_fresh) < least:
                continue
            row = self._row(state, min(fresh, budget), 0, 0)
            if state.cache.cover(self._pool, row.end, self._page_size):
                rows.append(row)
                budget -= row.num_rows
        return rows

    def _row(self, state: FeatureSession, num_rows: int, wanted: int, num_nodes: int) -> _HeadRow:
        editor = state.mask.after(state.follower.tokens) if state.mask and wanted else None
        single = state.samples or editor is not None
        chain = self._tree_width == 1 or (single and wanted > 0)
        num_guessed = self._drafter.num_fed(wanted, num_nodes, chain=chain) if wanted else 0
        return _HeadRow(state, num_rows, wanted, editor, chain, num_guessed)

    def _reserve_text(self, row: _HeadRow) -> bool:
        """Reserve pages for all of the text and what the round writes past it.

        Idle sessions give way. Without pages the session is lost before any of its prompt is fed.
        """
        while not row.state.cache.cover(
            self._pool, row.length - 1 + row.num_guessed, self._page_size
        ):
            if not self._makes_room(row.state.key):
                return False
        return True


def _is_left_out(state: FeatureSession) -> bool:
    """Return whether a draft would delay those of others: a newcomer's, or of many rows.

    Of the rows some may be yet to come.
    """
    return state.patient or len(state.follower.tokens) - 1 - state.cache.computed > _SHORT


def _lacks_rows(state: FeatureSession) -> bool:
    """Return whether rows are yet to come, and those at hand are not worth a forward."""
    return not state.ready and state.num_fresh < _PART


def _continues(state: FeatureSession, row: DraftInput) -> bool:
    """Return whether a draft that was launched for `row` continues the text."""
    num_fresh = len(state.follower.tokens) - 1 - row.slice.start
    return 0 < num_fresh <= len(row.slice.token_ids)
