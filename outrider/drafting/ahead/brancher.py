"""Drafts with candidates, and branches for the outcomes of their verification, in joint batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.drafting.ahead.branches import (
    Branch,
    DraftedBranch,
    ForkDrafter,
    Trunk,
    draft_branches,
    lengthen,
)
from outrider.drafting.ahead.budget import choose_budget, plan_branches
from outrider.drafting.ahead.outcomes import NUM_RANKS, Outcomes, Pace
from outrider.drafting.draft_model.chains import Forks
from outrider.drafting.draft_model.session import DraftRow, DraftState
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.policy.timing import Average, StepTimes
from outrider.params import SamplingParams

_FREE = 1.25
"""Rows that make a batch this much slower at the most may join drafts that are waited for."""


class Brancher:
    """Chooses branches by what was measured, drafts them, and measures what that took."""

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
        self._rows_s = StepTimes()  # seconds of a forward by its rows

    def draft(
        self, rows: Sequence[DraftRow], others: Sequence[DraftState], pace: Pace
    ) -> list[DraftState]:
        """Drafts for `rows`, all to one length, which are left with lines and candidates.

        `others` have their drafts: those of them that got branches along with it are returned.
        """
        num_tokens = rows[0].num_forked
        longest = max([state.follower.wanted for state in others], default=0)
        states = self._branching(others, num_tokens) if longest <= num_tokens else []
        branches, _ = self._choose(states, pace)
        alone = self._rows_s.estimate(len(rows))
        if self._rows_s.estimate(len(rows) + len(branches)) > _FREE * alone:
            branches = []
        joint = _Joint(self._drafter, rows)
        started = self._clock()
        drafted = self._run(joint, states, branches, num_tokens)
        if joint.drafted is None:
            joint.forks((), (), num_tokens - 1, NUM_RANKS)
        seconds = self._clock() - started
        self._rows_s.observe(len(rows) + len(drafted), seconds / num_tokens)
        self._draft_s.add(seconds)
        joint.hand_out()
        return [state for state in states if state.ahead.branches]

    def branch(self, states: Sequence[DraftState], pace: Pace) -> list[DraftState]:
        """Drafts branches for the sessions of `states` that want some; returns those."""
        num_tokens = max([state.follower.wanted for state in states], default=0)
        branching = self._branching(states, num_tokens)
        branches, num_tokens = self._choose(branching, pace)
        if not branches:
            return []
        started = self._clock()
        drafted = self._run(self._drafter, branching, branches, num_tokens)
        if drafted:
            self._rows_s.observe(len(drafted), (self._clock() - started) / num_tokens)
        return branching

    def lengthen(self, states: Sequence[DraftState]) -> None:
        """Find the candidates at the ends of the branches of `states`, which were pushed.

        Without it nothing is known of what follows a draft that is accepted as a whole, but how
        the likeliest text goes on.
        """
        states = [s for s in states if s.ahead.branches and s.ahead.beyond is None]
        branches: list[tuple[Trunk, DraftedBranch]] = []
        for state in states:
            trunk = state.trunk()
            branches += [(trunk, branch) for branch in state.ahead.branches]
        if not branches:
            return
        started = self._clock()
        forks = lengthen(self._drafter, branches, NUM_RANKS)
        self._rows_s.observe(len(branches), self._clock() - started)
        first = 0
        for state in states:
            end = first + len(state.ahead.branches)
            state.ahead.beyond = Forks(forks.candidates[first:end], forks.gaps[first:end])
            first = end

    def _branching(self, states: Sequence[DraftState], num_tokens: int) -> list[DraftState]:
        room = self._max_model_len - num_tokens
        return [state for state in states if state.can_branch(room)]

    def _choose(self, states: Sequence[DraftState], pace: Pace) -> tuple[list[Branch], int]:
        """Of all the sessions' outcomes those worth a branch, the likeliest first; their tokens."""
        if not states:
            return [], 0
        outcomes = self._outcomes
        undrafted = {hit: outcomes.undrafted(hit=hit) for hit in (False, True)}
        sizes = np.array([len(state.gaps) for state in states])
        plans = plan_branches(
            outcomes.chances(np.concatenate([state.gaps for state in states])),
            sizes,
            np.array([len(state.held) for state in states]),
            self._max_branches,
            np.array([undrafted[state.hit] for state in states]),
        )
        count, num_tokens = choose_budget(
            plans,
            self._rows_s.estimate,
            self._draft_s.mean,
            pace,
            wanted=max([state.follower.wanted for state in states]),
            acceptance=outcomes.acceptance,
        )
        trunks, chosen = plans.best(count)
        candidates = np.concatenate([state.candidates for state in states])
        firsts = (sizes.cumsum() - sizes) * NUM_RANKS  # of the sessions' candidates
        tokens = candidates.take(firsts[trunks] + chosen)
        accepted = chosen // NUM_RANKS
        branches = map(Branch, trunks.tolist(), accepted.tolist(), tokens.tolist())
        return list(branches), num_tokens

    def _run(
        self,
        drafter: ForkDrafter,
        states: Sequence[DraftState],
        branches: Sequence[Branch],
        num_tokens: int,
    ) -> list[DraftedBranch]:
        drafted = draft_branches(
            drafter,
            self._pool,
            [state.trunk() for state in states],
            branches,
            num_tokens=num_tokens - 1,
            fanout=NUM_RANKS,
        )
        for branch in drafted:
            states[branch.branch.trunk].ahead.branches.append(branch)
        return drafted


class _Joint:
    """A `ForkDrafter` that drafts for `rows`, too, in the batch that it is asked for."""

    def __init__(self, drafter: ForkDrafter, rows: Sequence[DraftRow]) -> None:
        self.page_size = drafter.page_size
        self.drafted: Forks | None = None
        self._drafter = drafter
        self._rows = rows

    def forks(
        self,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Forks:
        forks = self._drafter.forks(
            [*(row.slice() for row in self._rows), *slices],
            [*(row.state.follower.sampling for row in self._rows), *sampling],
            num_tokens,
            fanout,
            copies,
        )
        n = len(self._rows)
        self.drafted = Forks(forks.candidates[:n], forks.gaps[:n])
        return Forks(forks.candidates[n:], forks.gaps[n:])

    def hand_out(self) -> None:
        """Give the rows what was drafted for them: a guess more than is fed."""
        assert self.drafted is not None
        chains: list[list[int]] = self.drafted.chains.tolist()
        for i, (row, chain) in enumerate(zip(self._rows, chains, strict=True)):
            ahead = row.state.ahead
            ahead.line = chain
            ahead.candidates, ahead.gaps = self.drafted.candidates[i], self.drafted.gaps[i]
