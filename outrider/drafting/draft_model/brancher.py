"""Draft chains with candidates, and branches for the outcomes of their verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from outrider.averages import Average
from outrider.draft_tree import DraftTree
from outrider.drafting.ahead.branches import NUM_RANKS, Branch, draft_branches
from outrider.drafting.ahead.budget import Budget, Plans, choose_budget, plan_branches
from outrider.drafting.ahead.outcomes import Outcomes
from outrider.drafting.draft_model.session import DraftState
from outrider.drafting.draft_model.trees import BranchedTrees
from outrider.drafting.drafters import CATCH_UP, ForkBatch, ForkDrafter
from outrider.drafting.proposer import LoopRun, Pace, SessionKey
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.params import SamplingParams
from outrider.step_times import StepTimes

_FREE = 1.25
"""Branches join drafts that are waited for if they make the batch this much slower at most."""

_AWAITED = 0.5
"""Share of rounds after a miss that verify no draft, from which on the scorer goes on without."""


class Brancher:
    """Chooses branches by measured chances and times, and drafts them."""

    def __init__(
        self,
        drafter: ForkDrafter,
        pool: BlockPool,
        outcomes: Outcomes,
        *,
        max_branches: int,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self._drafter = drafter
        self._outcomes = outcomes
        self._pool = pool
        self._max_branches = max_branches
        self._max_model_len = max_model_len
        self._clock = clock
        self._draft_s = Average()
        self._noted_s = StepTimes()
        self._unnoted: list[tuple[int, float]] = []  # rows, and seconds of a forward
        self._loops: list[LoopRun] = []
        self._growing: ForkBatch | None = None  # the last batch, if it had branches

    def take_loops(self) -> list[LoopRun]:
        """Return what ran since the last call."""
        loops, self._loops = self._loops, []
        return loops

    def draft(
        self,
        rows: Sequence[tuple[DraftState, RowSlice]],
        num_tokens: int,
        others: Sequence[DraftState],
        pace: Pace,
    ) -> list[tuple[SessionKey, DraftTree]]:
        """Draft at most `num_tokens` after `rows`, which are left with lines and candidates.

        `others` have their drafts. Those of them that got branches in the same batch are returned,
        with their trees. With these, drafts may be shorter.
        """
        longest = max([state.follower.wanted for state in others], default=0)
        num_pages = -(-num_tokens // self._drafter.page_size) + 1  # of a branch, at most
        joins = longest <= num_tokens and num_pages <= self._pool.num_free
        states = self._branching(others, num_tokens) if joins else []
        branches: list[Branch] = []
        if states and max([len(row.token_ids) for _, row in rows]) <= CATCH_UP:
            branches, num_tokens = self._choose_joined(states, pace, len(rows), num_tokens)
        started = self._clock()
        joined = [(row, state.follower.sampling) for state, row in rows]
        trees, batch = self._run(states, branches, num_tokens, joined)
        assert batch is not None
        seconds = self._clock() - started
        self._ran(len(rows), len(trees), num_tokens, seconds)
        self._draft_s.add_time(seconds)
        for i, (state, _) in enumerate(rows):
            state.ahead.begin(batch.row(i))
        return trees.push(batch)

    def branch(
        self, states: Sequence[DraftState], pace: Pace
    ) -> list[tuple[SessionKey, DraftTree]]:
        """Draft branches for those of `states` that they are worth it for; return their trees."""
        num_tokens = max([state.follower.wanted for state in states], default=0)
        branching = self._branching(states, num_tokens)
        if not branching:
            self._use_spare_time()
            return []
        plans = self._plan(branching)
        budget = self._budget(plans, num_tokens, pace)
        branches, num_tokens = self._best(plans, branching, budget), budget.tokens
        if not branches:
            self._use_spare_time()
            return []
        started = self._clock()
        trees, batch = self._run(branching, branches, num_tokens)
        if batch is None:  # no pages
            return []
        self._ran(0, len(trees), num_tokens, self._clock() - started)
        return trees.push(batch)

    def _use_spare_time(self) -> None:
        """Do what commits would wait for otherwise."""
        self._outcomes.count()
        self._note_times()
        growing, self._growing = self._growing, None
        if growing is not None:
            growing.grow()

    def _ran(self, num_drafts: int, num_branches: int, num_tokens: int, seconds: float) -> None:
        num_rows = num_drafts + num_branches
        self._unnoted.append((num_rows, seconds / num_tokens))
        captured = self._drafter.captured_rows(num_rows)
        self._loops.append(LoopRun(num_drafts, num_branches, captured, num_tokens, seconds))

    @property
    def _rows_s(self) -> StepTimes:
        """Seconds of a forward by its rows."""
        self._note_times()
        return self._noted_s

    def _note_times(self) -> None:
        """Note what loops took. Blocks are sent before, for which somebody may wait."""
        for num_rows, seconds in self._unnoted:
            self._noted_s.observe(num_rows, seconds)
        self._unnoted.clear()

    def _branching(self, states: Sequence[DraftState], num_tokens: int) -> list[DraftState]:
        room = self._max_model_len - num_tokens
        return [state for state in states if state.can_branch(room)]

    def _choose_joined(
        self, states: Sequence[DraftState], pace: Pace, num_rows: int, num_tokens: int
    ) -> tuple[list[Branch], int]:
        """Return the branches to draft together with `num_rows` drafts, and the tokens of all.

        Without branches, which come later, the drafts have `num_tokens`.
        """
        plans = self._plan(states)
        if not self._awaited:
            budget = self._budget(plans, num_tokens, pace, joined=num_rows)
            branches = self._best(plans, states, budget)
            return branches, budget.tokens if branches else num_tokens
        branches = self._best(plans, states, self._budget(plans, num_tokens, pace))
        with_them_s = self._rows_s.estimate(num_rows + len(branches))
        is_free = with_them_s <= _FREE * self._rows_s.estimate(num_rows)
        return branches if is_free else [], num_tokens

    @property
    def _awaited(self) -> bool:
        """The scorer waits for the draft of a session that missed.

        Otherwise such a draft is not urgent, and steps follow each other whatever comes.
        """
        return self._outcomes.undrafted(hit=False) < _AWAITED

    def _plan(self, states: Sequence[DraftState]) -> Plans:
        """Return the outcomes of sessions that are worth a branch."""
        outcomes = self._outcomes
        undrafted = {hit: outcomes.undrafted(hit=hit) for hit in (False, True)}
        gaps = [s.ahead.forks.gaps for s in states if s.ahead.forks is not None]
        return plan_branches(
            outcomes.chances(np.concatenate(gaps)),
            np.array([len(each) for each in gaps]),
            np.array([len(state.held) for state in states]),
            self._max_branches,
            np.array([undrafted[state.hit] for state in states]),
        )

    def _budget(self, plans: Plans, wanted: int, pace: Pace, joined: int = 0) -> Budget:
        return choose_budget(
            plans,
            lambda n: self._rows_s.estimates(n + joined),
            self._draft_s.mean,
            replace(pace, spent_s=0.0) if self._awaited else pace,
            wanted=wanted,
            acceptance=self._outcomes.acceptance,
            joined=joined > 0,
        )

    def _best(self, plans: Plans, states: Sequence[DraftState], budget: Budget) -> list[Branch]:
        """Return the likeliest outcomes within a budget, the likeliest first."""
        trunks, chosen = plans.best(budget.branches)
        candidates = [s.ahead.forks.candidates for s in states if s.ahead.forks is not None]
        return [
            Branch(trunk, outcome // NUM_RANKS, candidates[trunk].item(outcome))
            for trunk, outcome in zip(trunks.tolist(), chosen.tolist(), strict=True)
        ]

    def _run(
        self,
        states: Sequence[DraftState],
        branches: Sequence[Branch],
        num_tokens: int,
        joined: Sequence[tuple[RowSlice, SamplingParams]] = (),
    ) -> tuple[BranchedTrees, ForkBatch | None]:
        drafted, batch = draft_branches(
            self._drafter,
            self._pool,
            [state.trunk() for state in states],
            branches,
            joined,
            num_tokens=num_tokens - 1,
            fanout=NUM_RANKS,
        )
        for branch in drafted:
            trunk, accepted, token = branch.branch
            states[trunk].ahead.branches[accepted, token] = branch
        self._growing = batch if drafted else None
        # While the device drafts:
        trees = BranchedTrees([state for state in states if state.ahead.branches], num_tokens)
        self._outcomes.count()
        if batch is not None:
            batch.wait()
        return trees, batch
