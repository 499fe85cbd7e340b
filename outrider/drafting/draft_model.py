"""An independent small language model that drafts, batched over sessions, over its own paged cache.

A round is one catch-up forward, which feeds every session the committed tokens that its cache
lacks, then num_draft_tokens - 1 forwards of one token per session. Nothing is rolled back: what the
cache holds is compared with what was committed, and what differs is overwritten. After a fully
accepted draft the last drafted token was never fed, so it is among the tokens to catch up.

Tokens are drawn with the session's own sampling parameters and noise at their absolute positions
(`engine.sampling`), so a draft equals the target's choice wherever the models are close enough.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.draft_tree import DraftTree
from outrider.drafting.draft_steps import ReadyRow, draft_chains
from outrider.drafting.proposer import DraftRound, Follower, ProposerTraits, SessionKey
from outrider.engine.batch import Model, RowSlice
from outrider.engine.block_pool import ROOT_HASH, BlockPool, PageHash, page_hash
from outrider.errors import ConfigError
from outrider.types import SamplingParams, common_prefix_len

_SHORT = 16
"""Tokens to catch up that never wait for the prefill budget: what a round or two committed."""


class ChainDrafter(Protocol):
    """A faster way to do `draft_chains` for few tokens, over the model's own cache."""

    @property
    def max_tokens(self) -> int:
        """Up to so many tokens to catch up, of all rows together, it is faster."""
        ...

    def draft(self, slices: Sequence[RowSlice], ready: Sequence[ReadyRow]) -> list[list[int]]:
        """Feeds `slices`, then drafts a chain for each; `ready` are as many."""
        ...


class DraftModelProposer:
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
    ) -> None:
        if max_sessions < 1 or max_draft_tokens < 1 or prefill_budget < 1:
            raise ConfigError("max_sessions, max_draft_tokens and prefill_budget are at least 1.")
        room = model.num_pages * model.page_size
        if room < min(model.max_model_len, 64):
            raise ConfigError(
                f"{model.num_pages} pages of {model.page_size} tokens hold no session of use: "
                "give the draft model more KV-cache memory."
            )
        self.traits = ProposerTraits(
            method="draft_model",
            model=name,
            vocab_size=model.vocab_size,
            max_sessions=max_sessions,
            max_draft_tokens=max_draft_tokens,
            max_model_len=min(model.max_model_len, room),
        )
        self._model = model
        self._pool = BlockPool(model.num_pages)
        self._prefill_budget = prefill_budget
        self._chain_drafter = chain_drafter
        self._sessions: dict[SessionKey, _State] = {}  # least recently drafted first
        self._lost: list[SessionKey] = []

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(
        self,
        session: SessionKey,
        prefix: Sequence[int],
        sampling: SamplingParams,
        num_draft_tokens: int,
        max_len: int,
    ) -> None:
        assert session not in self._sessions
        if len(self._sessions) >= self.traits.max_sessions:
            self._lose(next(iter(self._sessions)))
        follower = Follower(prefix, sampling, num_draft_tokens, max_len, self.traits)
        state = _State(follower)
        state.adopt_cached_prefix(self._pool, self._model.page_size)
        self._sessions[session] = state

    def commit(
        self, session: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> None:
        state = self._sessions.get(session)
        if state is None:
            return
        if not state.follower.commit(base_len, tokens, num_draft_tokens):
            self._lose(session)
            return
        if state.follower.silent:
            state.drop(self._pool)

    def close(self, session: SessionKey) -> None:
        state = self._sessions.pop(session, None)
        if state is not None:
            state.drop(self._pool)

    def draft(self, sessions: Sequence[SessionKey]) -> DraftRound:
        done = DraftRound()
        rows = self._plan(sessions, done)
        done.lost.extend(self._lost)
        self._lost.clear()
        if not rows:
            return done
        chains, forward_s = self._run(rows)
        page_size = self._model.page_size
        for row in rows:
            state = row.state
            length = len(state.follower.tokens)
            state.computed += row.num_tokens
            state.publish(self._pool, page_size)
            if row.wanted == 0:
                done.unfinished.append(row.session)
                continue
            chain = chains.pop(0)
            state.drafted = chain[:-1]  # the last token was never fed
            done.drafts.append((row.session, DraftTree.chain(length, chain)))
        return replace(done, forward_s=forward_s)

    def ahead(self, sessions: Sequence[SessionKey]) -> DraftRound:  # noqa: ARG002
        return DraftRound()

    def check_invariants(self) -> None:
        """Raises `AssertionError` unless pages and sessions agree."""
        self._pool.check_invariants(state.block_table for state in self._sessions.values())
        for state in self._sessions.values():
            room = len(state.block_table) * self._model.page_size
            assert state.computed + len(state.drafted) <= room
            assert state.computed <= len(state.follower.tokens)

    def _plan(self, sessions: Sequence[SessionKey], done: DraftRound) -> list[_Row]:
        """Who takes part with how many tokens, their pages reserved; most drafts wanted first."""
        budget = self._prefill_budget
        asked = set(sessions)
        rows: list[_Row] = []
        for session in sessions:
            state = self._sessions.pop(session, None)
            if state is None:
                continue
            self._sessions[session] = state  # now the most recently drafted
            wanted = state.follower.wanted
            if wanted == 0:
                done.drafts.append((session, DraftTree.chain(len(state.follower.tokens), ())))
                continue
            missing = state.settle()
            if missing > _SHORT:
                missing, whole = min(missing, budget), missing
                budget -= missing
                wanted = wanted if missing == whole else 0
            if missing == 0:
                done.unfinished.append(session)
            elif self._reserve(state, state.computed + missing + max(wanted - 1, 0), asked):
                rows.append(_Row(session, state, missing, wanted))
            else:
                self._lose(session)
        rows.sort(key=lambda row: -row.wanted)
        return rows

    def _reserve(self, state: _State, num_tokens: int, asked: set[SessionKey]) -> bool:
        """Extends the block table to `num_tokens`, at the cost of sessions not asked for."""
        needed = -(-num_tokens // self._model.page_size) - len(state.block_table)
        while needed > self._pool.num_free:
            idle = next((s for s in self._sessions if s not in asked), None)
            if idle is None:
                return False
            self._lose(idle)
        for _ in range(needed):
            state.block_table.append(self._pool.allocate())
        return True

    def _run(self, rows: list[_Row]) -> tuple[list[list[int]], float]:
        slices = []
        ready = []
        for row in rows:
            state = row.state
            tokens = state.follower.tokens
            start = state.computed
            end = start + row.num_tokens
            slices.append(RowSlice(tokens[start:end], start, state.block_table, 1))
            if row.wanted:
                ready.append(ReadyRow(end, row.wanted, state.follower.sampling))
        started = time.perf_counter()
        fast = self._chain_drafter
        chains: list[list[int]] = []
        num_tokens = sum(row.num_tokens for row in rows[: len(ready)])
        if fast and ready and num_tokens <= fast.max_tokens:
            chains = fast.draft(slices[: len(ready)], ready)
            slices, ready = slices[len(ready) :], []
        if slices:
            chains += draft_chains(self._model, slices, ready)
        return chains, time.perf_counter() - started

    def _lose(self, session: SessionKey) -> None:
        self.close(session)
        self._lost.append(session)


@dataclass(frozen=True, slots=True)
class _Row:
    """A session's part in one round."""

    session: SessionKey
    state: _State
    num_tokens: int  # committed tokens fed by the catch-up forward
    wanted: int  # draft tokens; 0: the prompt is not through yet


class _State:
    """A session's tokens and what the cache holds of them."""

    __slots__ = ("block_table", "computed", "drafted", "follower", "hashes")

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.block_table: list[int] = []
        self.computed = 0  # committed tokens whose keys and values are in the cache
        self.drafted: list[int] = []  # guesses whose keys and values follow them there
        self.hashes: list[PageHash] = []  # of the full pages that are shared or published

    def settle(self) -> int:
        """Counts drafted tokens that came true as computed; returns how many are to be fed.

        At least one: the last token's logits are what the draft begins with.
        """
        tokens = self.follower.tokens
        if self.drafted:
            fresh = tokens[self.computed : self.computed + len(self.drafted)]
            self.computed += common_prefix_len(fresh, self.drafted)
            self.drafted = []
        self.computed = min(self.computed, len(tokens) - 1)
        return len(tokens) - self.computed

    def adopt_cached_prefix(self, pool: BlockPool, page_size: int) -> None:
        tokens = self.follower.tokens
        key = ROOT_HASH
        hashes: list[PageHash] = []
        for start in range(0, (len(tokens) - 1) // page_size * page_size, page_size):
            key = page_hash(key, tokens[start : start + page_size])
            hashes.append(key)
        pages = pool.match(hashes)
        pool.share(pages)
        self.block_table = pages
        self.hashes = hashes[: len(pages)]
        self.computed = len(pages) * page_size

    def publish(self, pool: BlockPool, page_size: int) -> None:
        """Shares the full pages; not the one of the last token, which may be fed again."""
        end = min(self.computed, len(self.follower.tokens) - 1) // page_size
        for i in range(len(self.hashes), end):
            tokens = self.follower.tokens[i * page_size : (i + 1) * page_size]
            self.hashes.append(page_hash(self.hashes[-1] if self.hashes else ROOT_HASH, tokens))
            pool.publish(self.block_table[i], self.hashes[-1])

    def drop(self, pool: BlockPool) -> None:
        pool.release(self.block_table)
        self.block_table, self.hashes, self.drafted = [], [], []
        self.computed = 0
