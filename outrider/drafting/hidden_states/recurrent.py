"""Drafts with a module that reads the target's hidden states: EAGLE, EAGLE-3, MTP.

A round is one forward over the rows that became true since the last (drafting/heads/base.py), with
the target's states, and some of a few rows per session with the module's own, which make a tree of
guesses (drafting/tree_steps.py). Under rejection and within a constraint it makes chains.
Rows of the second kind leave keys and values behind that the next round overwrites: accepted tokens
are fed again with true states. (Keeping what came of its own states costs an eighth of the accepted
tokens.) Sessions of a round share its forwards; long prompts take several rounds.

It does not run ahead: what it would draft from are states that the target has not computed yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.draft_tree import DraftTree
from outrider.drafting.ahead.outcomes import NO_PACE, Pace
from outrider.drafting.draft_model.masks import DraftMasks
from outrider.drafting.graphs.loops import Capture
from outrider.drafting.graphs.recurrent_heads import RecurrentLoops
from outrider.drafting.hidden_states.eager import HeadDrafter
from outrider.drafting.hidden_states.forward import LEAD
from outrider.drafting.hidden_states.grow_trees import max_fed_nodes
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.rows import HeadRow, inputs_of
from outrider.drafting.hidden_states.session import FeatureMethod, FeatureSession
from outrider.drafting.hidden_states.trees import max_trees
from outrider.drafting.proposer import (
    TREE_WIDTH,
    DraftRound,
    Follower,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.drafting.session_pages import PageCache
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.pools import KVPools
from outrider.errors import ConfigError

_SHORT = 16
"""Rows that never wait for the prefill budget: what a round or two committed."""

_PART = 256
"""Rows that are worth a forward while more of the prompt are to come: few take as long."""


class RecurrentProposer(FeatureMethod):
    """Drafts with `head` over `pools`, which are its own. Raises `ConfigError` for too small ones.

    `prefill_budget` bounds the prompt rows of one call of `draft`, so that a long prompt does not
    hold up the other sessions' drafts. With `tree_width` 1 drafts are chains. With `recording` all
    of these (constrained and prompts apart) are drafted by loops that are recorded now, whose
    shapes are of this width, and which take the pools' last page.
    """

    def __init__(
        self,
        head: RecurrentHead,
        pools: KVPools,
        backend: AttentionBackend,
        *,
        method: str,
        name: str,
        max_sessions: int = 256,
        max_draft_tokens: int = 16,
        max_model_len: int | None = None,
        prefill_budget: int = 256,
        tree_width: int = TREE_WIDTH,
        masks: DraftMasks | None = None,
        recording: Capture | None = None,
    ) -> None:
        if min(max_sessions, max_draft_tokens, prefill_budget, tree_width) < 1:
            raise ConfigError(
                "max_sessions, max_draft_tokens, prefill_budget and tree_width are at least 1."
            )
        longest = min(head.max_model_len, max_model_len or head.max_model_len)
        recorded = recording is not None
        spare = max_fed_nodes(max_draft_tokens, tree_width, recorded=recorded)
        num_pages = pools.num_pages - recorded
        room = num_pages * pools.page_size - spare
        if room < min(longest, 64):
            raise ConfigError(
                f"{pools.num_pages} pages of {pools.page_size} tokens hold no session of use: "
                "give the draft module more KV-cache memory."
            )
        super().__init__(
            ProposerTraits(
                method=method,
                model=name,
                vocab_size=head.vocab_size,
                max_sessions=max_sessions,
                max_draft_tokens=max_draft_tokens,
                max_model_len=min(longest, room),
                features=head.features,
            ),
            masks,
        )
        head.bind(pools)
        self._head = head
        self._page_size = pools.page_size
        self._pool = BlockPool(num_pages)
        self._prefill_budget = prefill_budget
        self._tree_width = tree_width
        self._at_once = max_trees(tree_width, head.vocab_size)
        self._caches: dict[SessionKey, PageCache] = {}
        self._recorded = recorded
        self._drafter = HeadDrafter(head, backend, pools.page_size)
        if recording is not None:
            self._drafter = RecurrentLoops(
                head,
                backend,
                recording,
                page_size=pools.page_size,
                scratch_page=num_pages,
                max_model_len=self.traits.max_model_len,
            )

    @property
    def projection(self) -> bytes:
        return self._head.projection

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        done = DraftRound()
        rows = self._plan(self._asked(sessions), done)
        if rows:
            done = replace(done, forward_s=self._run(rows, done))
        done.lost.extend(self._take_lost())  # at last: if a forward fails, the next round says it
        return done

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:  # noqa: ARG002
        """Feed rows of sessions of which no draft is asked, as where another method drafts: they
        would pile up, and the first draft that is asked for would have to wait for all of them.
        """
        if rows := self._plan_unasked():
            self._run(rows, DraftRound())
        return DraftRound()

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless pages, rows and sessions agree."""
        assert self._caches.keys() == self._sessions.keys()
        self._pool.check_invariants([cache.block_table for cache in self._caches.values()])
        for key, cache in self._caches.items():
            state = self._sessions[key]
            assert cache.computed <= len(cache.block_table) * self._page_size
            assert cache.computed <= max(0, len(state.follower.tokens) - 1)
            assert state.first <= cache.computed or state.first == state.end

    def _run(self, rows: list[HeadRow], done: DraftRound) -> float:
        """Feed and drafts; returns how long it took."""
        started = time.perf_counter()
        trees = [row for row in rows if not row.chain]
        chains = [row for row in rows if row.chain and not row.sampled]
        sampled = [row for row in rows if row.sampled]
        # Of all of these the first rows are those that a draft is wanted for.
        for i in range(0, len(trees), self._at_once):
            part = trees[i : i + self._at_once]
            grown = self._drafter.trees(*inputs_of(part), self._tree_width)
            for row, (tokens, parents) in zip(part, grown, strict=False):
                tree = DraftTree(row.length, tuple(tokens), tuple(parents))
                done.drafts.append((row.state.key, tree))
        if chains:
            drawn = self._drafter.chains(*inputs_of(chains))
            for row, chain in zip(chains, drawn, strict=False):
                done.drafts.append((row.state.key, DraftTree.chain(row.length, chain)))
        if sampled:
            drawn_from = self._drafter.sampled_chains(*inputs_of(sampled))
            for row, (chain, probs) in zip(sampled, drawn_from, strict=True):
                done.drafts.append((row.state.key, DraftTree.chain(row.length, chain, probs)))
        forward_s = time.perf_counter() - started
        for row in rows:
            tokens = row.state.follower.tokens
            row.cache.computed = row.end
            row.cache.publish(self._pool, tokens, self._page_size)
            self._used(row.state)
            if row.wanted == 0:
                done.unfinished.append(row.state.key)
        return forward_s

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> FeatureSession:
        cache = self._caches[key] = PageCache(LEAD - 1)
        cache.adopt(self._pool, follower.tokens, self._page_size)
        return super()._begin(key, follower, start)

    def _used(self, state: FeatureSession) -> None:
        # The last row is fed again if another draft is asked for.
        computed = self._caches[state.key].computed
        state.forget(min(computed, max(0, len(state.follower.tokens) - 2)))

    def _release(self, state: FeatureSession) -> None:
        super()._release(state)
        self._caches[state.key].drop(self._pool)
        if state.key not in self._sessions:
            del self._caches[state.key]

    def _plan(self, asked: list[FeatureSession], done: DraftRound) -> list[HeadRow]:
        """Who takes part with how many rows, their pages reserved; most drafts wanted first."""
        budget = self._prefill_budget
        rows: list[HeadRow] = []
        for state in asked:
            cache, length = self._caches[state.key], state.follower.length
            wanted = state.follower.wanted
            if wanted == 0 or length < LEAD:
                done.drafts.append((state.key, DraftTree.chain(length, ())))
                continue
            cache.computed = min(cache.computed, length - LEAD)
            fresh = max(0, state.num_rows - cache.computed)
            if fresh < _PART and not state.ready:
                fresh = 0  # until the others have come
            missing = fresh if fresh <= _SHORT else min(fresh, budget)
            if fresh > _SHORT:
                budget -= missing
            if missing < fresh or not state.ready:
                wanted = 0
            rows.append(self._row(state, cache, missing, wanted))
        rows.sort(key=lambda row: -row.wanted)
        rows = [row for row in rows if self._reserve_text(row)]
        done.unfinished.extend([row.state.key for row in rows if not row.num_rows])
        return [row for row in rows if row.num_rows]

    def _plan_unasked(self) -> list[HeadRow]:
        """Rows that are worth a forward, or if many are held any; as far as there are pages."""
        least = _SHORT if self.holds_many else _PART
        budget = self._prefill_budget
        rows: list[HeadRow] = []
        for state in self._sessions.values():
            cache = self._caches[state.key]
            fresh = state.num_rows - cache.computed
            if fresh < least or not budget:
                continue
            row = self._row(state, cache, min(fresh, budget), 0)
            if cache.cover(self._pool, row.end, self._page_size):
                rows.append(row)
                budget -= row.num_rows
        return rows

    def _row(self, state: FeatureSession, cache: PageCache, num_rows: int, wanted: int) -> HeadRow:
        editor = state.mask.after(state.follower.tokens) if state.mask and wanted else None
        single = state.samples or editor is not None
        chain = self._tree_width == 1 or (single and wanted > 0)
        nodes = max_fed_nodes(wanted, self._tree_width, recorded=self._recorded)
        num_guessed = wanted - 1 if chain else nodes
        return HeadRow(state, cache, num_rows, wanted, editor, chain, max(0, num_guessed))

    def _reserve_text(self, row: HeadRow) -> bool:
        """Pages for all of the text and what the round writes past it, at the cost of idle
        sessions; without them the session is lost, before any of its prompt is fed.
        """
        while not row.cache.cover(self._pool, row.length - 1 + row.num_guessed, self._page_size):
            if not self._makes_room(row.state.key):
                return False
        return True
