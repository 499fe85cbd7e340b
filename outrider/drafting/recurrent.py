"""Drafts with a module that reads the target's hidden states: EAGLE, EAGLE-3, MTP.

A round is one forward over the rows that became true since the last (drafting/heads/base.py), with
the target's states, and some of a few rows per session with the module's own, which make a tree of
guesses (drafting/tree_steps.py). Under rejection and within a constraint it makes chains.
Rows of the second kind leave keys and values behind that the next round overwrites: accepted tokens
are fed again with true states. (Keeping what came of its own states costs an eighth of the accepted
tokens.) Sessions of a round share its forwards; long prompts take several rounds.

On a GPU drafts are made by recorded loops (drafting/head_loops.py).

It does not run ahead: what it would draft from are states that the target has not computed yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.draft_tree import DraftTree
from outrider.drafting.branch_plan import NO_PACE, Pace
from outrider.drafting.draft_mask import DraftMasks
from outrider.drafting.draft_steps import ReadyRow, draft_chains, sample_chains
from outrider.drafting.feature_session import FeatureMethod, FeatureSession
from outrider.drafting.guess_trees import max_trees
from outrider.drafting.head_forward import LEAD, HeadForward
from outrider.drafting.head_loops import HeadLoops
from outrider.drafting.heads.base import RecurrentHead
from outrider.drafting.proposer import (
    TREE_WIDTH,
    DraftRound,
    Follower,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.drafting.recorded_loops import Recording
from outrider.drafting.row_cache import RowCache
from outrider.drafting.tree_steps import draft_trees, max_fed_nodes
from outrider.engine.attention import AttentionBackend
from outrider.engine.batch import RowSlice
from outrider.engine.block_pool import BlockPool
from outrider.engine.constraint import ConstraintEditor
from outrider.engine.kv_cache import KVPools
from outrider.errors import ConfigError

_SHORT = 16
"""Rows that never wait for the prefill budget: what a round or two committed."""

_PART = 256
"""Rows that are worth a forward while more of the prompt are to come: few take as long."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A session's part in one round."""

    state: FeatureSession
    cache: RowCache
    num_rows: int  # true rows fed
    wanted: int  # draft tokens; 0: the prompt is not through yet
    mask: ConstraintEditor | None  # stands after the committed text; used up
    chain: bool  # the draft has one path
    num_guessed: int  # rows fed past the true ones at most

    @property
    def end(self) -> int:
        return self.cache.computed + self.num_rows

    @property
    def sampled(self) -> bool:
        """The draft is drawn with noise of its own."""
        return self.state.samples and self.wanted > 0

    def slice(self) -> RowSlice:
        start = self.cache.computed
        tokens = self.state.follower.tokens[start + 1 : self.end + 1]
        return RowSlice(tokens, start, self.cache.block_table, 1)

    def features(self) -> Tensor:
        """The states of the slice's tokens: bfloat16 [num_rows, width] on the host."""
        return self.state.rows(self.cache.computed, self.end)

    def ready(self) -> ReadyRow:
        """For a row that drafts."""
        follower = self.state.follower
        return ReadyRow(len(follower.tokens), self.wanted, follower.sampling, self.mask)


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
        recording: Recording | None = None,
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
        self._backend = backend
        self._page_size = pools.page_size
        self._pool = BlockPool(num_pages)
        self._prefill_budget = prefill_budget
        self._tree_width = tree_width
        self._at_once = max_trees(tree_width, head.vocab_size)
        self._caches: dict[SessionKey, RowCache] = {}
        self._loops: HeadLoops | None = None
        if recording is not None:
            self._loops = HeadLoops(
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
        """Feeds rows of sessions of which no draft is asked, as where another method drafts: they
        would pile up, and the first draft that is asked for would have to wait for all of them."""
        if rows := self._plan_unasked():
            self._run(rows, DraftRound())
        return DraftRound()

    def check_invariants(self) -> None:
        """Raises `AssertionError` unless pages, rows and sessions agree."""
        assert self._caches.keys() == self._sessions.keys()
        self._pool.check_invariants([cache.block_table for cache in self._caches.values()])
        for key, cache in self._caches.items():
            state = self._sessions[key]
            assert cache.computed <= len(cache.block_table) * self._page_size
            assert cache.computed <= max(0, len(state.follower.tokens) - 1)
            assert state.first <= cache.computed or state.first == state.end

    def _run(self, rows: list[_Row], done: DraftRound) -> float:
        """Feeds and drafts; returns how long it took."""
        started = time.perf_counter()
        trees = [row for row in rows if not row.chain]
        chains = [row for row in rows if row.chain and not row.sampled]
        sampled = [row for row in rows if row.sampled]
        for start in range(0, len(trees), self._at_once):
            done.drafts.extend(self._trees(trees[start : start + self._at_once]))
        if chains:
            done.drafts.extend(self._chains(chains))
        if sampled:
            done.drafts.extend(self._sampled_chains(sampled))
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
        cache = self._caches[key] = RowCache()
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

    def _plan(self, asked: list[FeatureSession], done: DraftRound) -> list[_Row]:
        """Who takes part with how many rows, their pages reserved; most drafts wanted first."""
        budget = self._prefill_budget
        keys = {state.key for state in asked}
        rows: list[_Row] = []
        for state in asked:
            cache, length = self._caches[state.key], len(state.follower.tokens)
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
            if missing == 0:
                done.unfinished.append(state.key)
            else:
                rows.append(self._row(state, cache, missing, wanted))
        rows.sort(key=lambda row: -row.wanted)
        return [row for row in rows if self._reserve_row(row, keys)]

    def _plan_unasked(self) -> list[_Row]:
        """Rows that are worth a forward, or if many are held any; as far as there are pages."""
        least = _SHORT if self.holds_many else _PART
        budget = self._prefill_budget
        rows: list[_Row] = []
        for state in self._sessions.values():
            cache = self._caches[state.key]
            fresh = state.num_rows - cache.computed
            if fresh < least or not budget:
                continue
            row = self._row(state, cache, min(fresh, budget), 0)
            if self._missing_pages(row) <= self._pool.num_free:
                self._reserve(row)
                rows.append(row)
                budget -= row.num_rows
        return rows

    def _row(self, state: FeatureSession, cache: RowCache, num_rows: int, wanted: int) -> _Row:
        editor = state.mask.after(state.follower.tokens) if state.mask and wanted else None
        single = state.samples or editor is not None
        chain = self._tree_width == 1 or (single and wanted > 0)
        recorded = self._loops is not None
        nodes = max_fed_nodes(wanted, self._tree_width, recorded=recorded)
        num_guessed = wanted - 1 if chain else nodes
        return _Row(state, cache, num_rows, wanted, editor, chain, max(0, num_guessed))

    def _reserve_row(self, row: _Row, asked: set[SessionKey]) -> bool:
        """Pages for what a row's round writes; without them the session is lost."""
        while self._missing_pages(row) > self._pool.num_free:
            idle = next((key for key in self._sessions if key not in asked), row.state.key)
            self._lose(idle)
            if idle == row.state.key:
                return False
        self._reserve(row)
        return True

    def _missing_pages(self, row: _Row) -> int:
        needed = -(-(row.end + row.num_guessed) // self._page_size)
        return max(0, needed - len(row.cache.block_table))

    def _reserve(self, row: _Row) -> None:
        pages = [self._pool.allocate() for _ in range(self._missing_pages(row))]
        row.cache.block_table.extend(pages)

    def _trees(self, rows: list[_Row]) -> Iterator[tuple[SessionKey, DraftTree]]:
        drafting = [row for row in rows if row.wanted]
        slices, ready = [row.slice() for row in rows], [row.ready() for row in drafting]
        if self._loops is None:
            grown = draft_trees(self._forward(rows), slices, ready, self._tree_width)
        else:
            features = [row.features() for row in rows]
            grown = self._loops.trees(slices, features, ready, self._tree_width)
        for row, each, (tokens, parents) in zip(drafting, ready, grown, strict=True):
            yield row.state.key, DraftTree(each.length, tuple(tokens), tuple(parents))

    def _chains(self, rows: list[_Row]) -> Iterator[tuple[SessionKey, DraftTree]]:
        drafting = [row for row in rows if row.wanted]
        slices, ready = [row.slice() for row in rows], [row.ready() for row in drafting]
        if self._loops is None:
            drawn = draft_chains(self._forward(rows), slices, ready, LEAD)
        else:
            drawn = self._loops.chains(slices, [row.features() for row in rows], ready)
        for row, each, chain in zip(drafting, ready, drawn, strict=True):
            yield row.state.key, DraftTree.chain(each.length, chain)

    def _sampled_chains(self, rows: list[_Row]) -> Iterator[tuple[SessionKey, DraftTree]]:
        slices, ready = [row.slice() for row in rows], [row.ready() for row in rows]
        drawn = sample_chains(self._forward(rows), slices, ready, LEAD)
        for row, each, (chain, probs) in zip(rows, ready, drawn, strict=True):
            yield row.state.key, DraftTree.chain(each.length, chain, probs)

    def _forward(self, rows: list[_Row]) -> HeadForward:
        """Feeds the true rows of `rows`, then what is drafted after the first of them."""
        features = [row.features() for row in rows]
        return HeadForward.of_host(self._head, self._backend, self._page_size, features)
