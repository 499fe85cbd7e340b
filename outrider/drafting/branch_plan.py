"""Which outcomes of a verification to draft for ahead of it: the likeliest, by measurement.

A draft c1 .. cK is verified. Outcome (a, r): its first `a` tokens are accepted, and the target's
next token is the one that the draft ranks r-th there, where c_{a+1} itself is r = 0. With
chances[a][r] the chance that this candidate is the true one after `a` true tokens,

    P(a, r) = chances[0][0] ... chances[a-1][0] * chances[a][r]      (r > 0 for a < K)

A candidate's chance is measured by its rank and its gap: how far its score (the logit over the
temperature, plus the request's noise) is behind the best's. The best's own is taken by the gap of
the runner-up. So a place where the draft hesitates gets branches, and one where it does not, none.

A row may also go on without its draft, as it does when the draft is late after a miss. Then one
token is decided, c1 or an alternative to it; with `undrafted` the share of such rounds,

    P'(a, r) = (1 - undrafted) * P(a, r) + undrafted * [a = 0] * chances[0][r]

Outcomes exclude one another and each costs one branch, so the best use of a budget is to take the
likeliest ones. Outcomes that end on the draft itself need no branch.

How large the budget is depends on time. With T the scorer's step, R the way there and back, C what
a draft takes that is made on demand, D(M) what M branches take and h(M) the sum of their chances, a
round takes

    max(T, D(M) + R) + (1 - h(M)) * (C + R)

and brings the same tokens whatever M is; M = 0, with D(0) = h(0) = 0, is drafting on demand. The M
of the shortest round gives the most tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_RANKS = 8  # candidates at each place, the draft's own included
_EDGES = np.array((0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10), np.float32)
_KINDS = 4  # ranks 0, 1, 2, and beyond
_KEPT = 0.998  # per round, of what was measured
_PRIOR_WEIGHT = 4.0  # candidates of each kind and gap
_PRIOR_UNDRAFTED = 0.1


class Outcome(NamedTuple):
    """`accepted` tokens of the draft come true, and then the candidate ranked `rank` there."""

    accepted: int
    rank: int
    chance: float


@dataclass(frozen=True, slots=True)
class Pace:
    """What drafting ahead is to be hidden behind, as measured. Zeros: not known yet."""

    step_s: float = 0.0  # the scorer's step
    network_s: float = 0.0  # the way to the scorer and back


NO_PACE = Pace()


def plan_branches(
    chances: NDArray[np.float64], budget: int, undrafted: float = 0.0
) -> tuple[Outcome, ...]:
    """At most `budget` outcomes of a draft of K tokens, the likeliest first. chances [K + 1, F]."""
    reached = np.cumprod(np.concatenate(((1.0,), chances[:-1, 0])))
    outcomes = (1.0 - undrafted) * reached[:, None] * chances
    outcomes[0] += undrafted * chances[0]
    outcomes[:-1, 0] = 0.0
    num_ranks = chances.shape[1]
    best = np.argsort(-outcomes, axis=None, kind="stable")[: max(0, budget)]
    return tuple(
        [
            Outcome(place // num_ranks, place % num_ranks, chance)
            for place, chance in zip(best.tolist(), outcomes.flat[best].tolist(), strict=True)
            if chance > 0.0
        ]
    )


def choose_budget(
    plans: Sequence[Sequence[Outcome]],
    branches_s: Callable[[int], float],
    draft_s: float,
    pace: Pace,
) -> int:
    """Branches per session that make a round shortest; 0: better drafted on demand.

    `plans` are the sessions' outcomes, the likeliest first; `branches_s(n)` is what n branches in
    one batch take, `draft_s` what their drafts take.
    """
    most = max(map(len, plans), default=0)
    on_demand = draft_s + pace.network_s
    best, shortest = 0, pace.step_s + on_demand
    hits = 0.0
    for m in range(1, most + 1):
        hits += sum([plan[m - 1].chance for plan in plans if len(plan) >= m]) / len(plans)
        ahead = branches_s(sum([min(m, len(plan)) for plan in plans])) + pace.network_s
        round_s = max(pace.step_s, ahead) + (1.0 - hits) * on_demand
        if round_s < shortest:
            best, shortest = m, round_s
    return best


class Outcomes:
    """Measures the chances of candidates from what was drafted and what then came true."""

    def __init__(self) -> None:
        size = (_KINDS, len(_EDGES) + 1)
        # Before anything is measured, chances fall with the gap as a softmax's do.
        middle = np.concatenate((_EDGES, (12.0,)))
        fall = np.exp(-middle)
        prior = np.stack((1.0 - 0.5 * fall, 0.4 * fall, 0.3 * fall, 0.2 * fall))
        self._true = _PRIOR_WEIGHT * prior
        self._seen = np.full(size, _PRIOR_WEIGHT)
        self._undrafted = {hit: [_PRIOR_UNDRAFTED * 8, 8.0] for hit in (False, True)}
        self._noted: list[tuple[NDArray[np.int32], NDArray[np.float32], Sequence[int], bool]] = []

    def chances(self, gaps: NDArray[np.float32]) -> NDArray[np.float64]:
        """The chance of each candidate: gaps [n, F], best first, to [n, F]; never rising."""
        self._count()
        cells = _cells(gaps)
        chances = self._true[cells] / self._seen[cells]
        chances[~np.isfinite(gaps)] = 0.0  # what top_k, top_p or min_p cut
        chances /= np.maximum(1.0, chances.sum(axis=1, keepdims=True))
        # A better rank is likelier; where few measurements say otherwise, they are noise.
        result: NDArray[np.float64] = -np.sort(-chances, axis=1)
        return result

    def undrafted(self, *, hit: bool) -> float:
        """The share of rounds that verified no draft; `hit`: it was at hand when wanted."""
        self._count()
        successes, trials = self._undrafted[hit]
        return successes / trials

    def observe(
        self,
        candidates: NDArray[np.int32],
        gaps: NDArray[np.float32],
        truth: Sequence[int],
        *,
        hit: bool,
    ) -> None:
        """`truth` followed where these were drafted: [n, F] each, the draft's own first.

        It is only noted here, and counted when chances are asked for: a commit's draft may be
        waited for, branches are made in spare time.
        """
        self._noted.append((candidates, gaps, truth, hit))

    def _count(self) -> None:
        """Takes in what was noted: per place up to the first where the draft was wrong."""
        if not self._noted:
            return
        gaps: list[NDArray[np.float32]] = []
        true: list[NDArray[np.bool_]] = []
        for candidates, their_gaps, truth, hit in self._noted:
            most = min(len(truth), len(candidates))
            n = 1
            while n < most and candidates[n - 1, 0] == truth[n - 1]:
                n += 1
            gaps.append(their_gaps[:n])
            true.append(candidates[:n] == np.asarray(truth[:n])[:, None])
            if len(candidates) > 2 and candidates[0, 0] == truth[0]:
                # A verified draft whose first token is accepted brings a second token.
                share = self._undrafted[hit]
                share[0] = 0.98 * share[0] + (len(truth) == 1)
                share[1] = 0.98 * share[1] + 1
        fading = np.where(self._seen > _PRIOR_WEIGHT, _KEPT ** len(self._noted), 1.0)
        self._noted.clear()
        self._true *= fading
        self._seen *= fading
        cells = _cells(np.concatenate(gaps))
        np.add.at(self._true, cells, np.concatenate(true))
        np.add.at(self._seen, cells, 1.0)


def _cells(gaps: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the measurements of candidates are: kind and bucket, [n, F] each."""
    kinds = np.minimum(np.arange(gaps.shape[1]), _KINDS - 1)
    buckets = np.searchsorted(_EDGES, gaps)
    buckets[:, 0] = buckets[:, min(1, gaps.shape[1] - 1)]
    return np.broadcast_to(kinds, gaps.shape), buckets
