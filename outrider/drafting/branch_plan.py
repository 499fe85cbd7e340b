"""Which outcomes of a verification to draft for ahead of it: the likeliest, by measurement.

A proposer guesses c1 .. cn, and knows F candidates at each of these n places; the scorer verifies
the first v of them. Outcome (a, r): c1 .. ca come true, and then the candidate ranked r-th there,
where c_{a+1} itself is r = 0. With chances[a][r] the chance that this candidate is the true one
after `a` true tokens,

    P(a, r) = chances[0][0] ... chances[a-1][0] * chances[a][r]      (r > 0, a <= v)

Where nothing is refused the guess must go on past its end: that is outcome (n - 1, 0), one branch
too. Its chance is that of all that is verified and, if it is known, of the token after that.

A candidate's chance is measured by its rank and its gap: how far its score (the logit over the
temperature, plus the request's noise) is behind the best's. The best's own is taken by the gap of
the runner-up. So a place where the draft hesitates gets branches, and one where it does not, none.

A row may also go on without its draft, as it does when the draft is late after a miss. Then one
token is decided, c1 or an alternative to it; with `undrafted` the share of such rounds,

    P'(a, r) = (1 - undrafted) * P(a, r) + undrafted * [a = 0] * chances[0][r]

Outcomes exclude one another and each costs one branch, so the best use of a budget is to take the
likeliest ones.

How many branches, and of how many tokens, depends on time. With T the scorer's step, R the way
there and back, f(M) a forward of M branches, h(M) the sum of their chances and C what a draft takes
that is made on demand, branches of k tokens are there A = k * f(M) + R after the verdict before;
one forward more, while they are on their way, finds the candidates at their ends. What comes late
delays the next verdict, too, which gives the branches after that a start: in the long run a round
is longer by half of A - T. So it takes

    max(T, (T + A) / 2, (k + 1) * f(M)) + (1 - h(M)) * (C + R)

and brings E(k) = 1 + a + .. + a^k tokens of acceptance a: short branches that come in time often
bring more per second than long ones that are waited for. M = 0 is drafting on demand. Of nearly
equal choices it is the shortest: what comes late may be waited for in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.types import common_prefix_len

NUM_RANKS = 8  # candidates at each place, the draft's own included
_EDGES = np.array((0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10), np.float32)
_KINDS = 4  # ranks 0, 1, 2, and beyond
_BUCKETS = len(_EDGES) + 1
_FIRST_CELLS = np.minimum(np.arange(NUM_RANKS), _KINDS - 1) * _BUCKETS  # by rank
_KEPT = 0.998  # per round, of what was measured
_PRIOR_WEIGHT = 4.0  # candidates of each kind and gap
_PRIOR_UNDRAFTED = 0.1
_NEARLY = 0.95  # of the most tokens per second
_SLACK = 0.1  # of a step, by which drafting takes longer now and then


class Plans(NamedTuple):
    """The outcomes of sessions that are worth a branch, each session's likeliest first."""

    chances: NDArray[np.float64]  # [sessions, B]; 0: no outcome, which come last
    outcomes: NDArray[np.int64]  # [sessions, B]: place a * F + r is outcome (a, r)

    def best(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sessions and outcomes of each session's `count` likeliest, the likeliest first.

        Of equally likely ones it is the first session's.
        """
        chances = self.chances[:, :count]
        sessions, columns = chances.nonzero()
        order = (-chances[sessions, columns]).argsort(kind="stable")
        sessions = sessions[order]
        return sessions, self.outcomes[sessions, columns[order]]


@dataclass(frozen=True, slots=True)
class Pace:
    """What drafting ahead is to be hidden behind, as measured. Zeros: not known yet."""

    step_s: float = 0.0  # the scorer's step
    network_s: float = 0.0  # the way to the scorer and back


NO_PACE = Pace()


class Budget(NamedTuple):
    """What to draft ahead: so many branches per session, of so many tokens."""

    branches: int
    tokens: int


def plan_branches(
    chances: NDArray[np.float64],
    sizes: NDArray[np.int64],
    verified: NDArray[np.int64],
    budget: int,
    undrafted: NDArray[np.float64],
) -> Plans:
    """At most `budget` outcomes of each session.

    chances [places, F] are of the sessions' places, one session's `sizes` after the other's; its
    first `verified` matter, and (size - 1, 0) stands for the guess that goes on.
    """
    sessions, place = np.arange(len(sizes)), np.arange(sizes.max())
    ends = sizes - 1
    outcomes = np.zeros((len(sizes), len(place), chances.shape[1]))
    outcomes[place <= ends[:, None]] = chances
    first = undrafted[:, None] * outcomes[:, 0]
    reached = np.empty(outcomes.shape[:2])
    reached[:, 0] = 1.0 - undrafted
    outcomes[:, :-1, 0].cumprod(axis=1, out=reached[:, 1:])
    reached[:, 1:] *= reached[:, :1]
    outcomes *= reached[:, :, None]
    outcomes[:, 0] += first
    last = np.minimum(verified, ends)
    goes_on = outcomes[sessions, last, 0]
    outcomes[place > last[:, None]] = 0.0
    outcomes[:, :, 0] = 0.0
    outcomes[sessions, ends, 0] = goes_on
    flat = outcomes.reshape(len(sizes), -1)
    best = (-flat).argsort(axis=1, kind="stable")[:, :budget]
    return Plans(flat[sessions[:, None], best], best)


def choose_budget(
    plans: Plans,
    forward_s: Callable[[int], float],
    draft_s: float,
    pace: Pace,
    *,
    wanted: int,
    acceptance: float,
) -> Budget:
    """What brings most tokens per second; no branches: better drafted on demand.

    `forward_s(n)` is what a forward of n branches takes, `draft_s` what a draft of `wanted` tokens
    on demand does.
    """
    rows = (plans.chances > 0.0).sum(axis=0)
    most = int(np.count_nonzero(rows))
    if not forward_s(1):
        return Budget(most, wanted)  # nothing was measured yet
    # By the number of branches M, 0 .. most, and of tokens k, 1 .. wanted.
    chances = np.ascontiguousarray(plans.chances.T[:most])
    hits = chances.sum(axis=1).cumsum()[:, None] / len(plans.chances)
    forward = np.array([forward_s(n) for n in rows[:most].cumsum().tolist()])[:, None]
    tokens = (acceptance ** np.arange(wanted + 1)).cumsum()  # E(0), E(1), ...
    k = np.arange(1, wanted + 1)
    on_demand = draft_s + pace.network_s
    slack = _SLACK * pace.step_s
    ahead = k * forward + (pace.network_s + slack)
    busy = (k + 1) * forward + slack
    round_s = np.maximum(np.maximum((pace.step_s + ahead) / 2, pace.step_s), busy)
    misses = 1.0 - hits
    rates = np.zeros((most + 1, wanted))
    rates[0, -1] = tokens[-1] / (pace.step_s + on_demand)
    rates[1:] = (hits * tokens[1:] + misses * tokens[-1]) / (round_s + misses * on_demand)
    best: list[float] = rates.max(axis=0).tolist()
    enough = _NEARLY * max(best)
    shortest = next(i for i, rate in enumerate(best) if rate >= enough)
    return Budget(int(rates[:, shortest].argmax()), shortest + 1)


class Outcomes:
    """Measures the chances of candidates from what was drafted and what then came true."""

    def __init__(self) -> None:
        # Before anything is measured, chances fall with the gap as a softmax's do.
        middle = np.concatenate((_EDGES, (12.0,)))
        fall = np.exp(-middle)
        prior = np.stack((1.0 - 0.5 * fall, 0.4 * fall, 0.3 * fall, 0.2 * fall))
        self._true = _PRIOR_WEIGHT * prior  # by kind and bucket; a cell is a place in that order
        self._seen = np.full((_KINDS, _BUCKETS), _PRIOR_WEIGHT)
        self._undrafted = {hit: [_PRIOR_UNDRAFTED * 8, 8.0] for hit in (False, True)}
        self._noted: list[tuple[NDArray[np.int32], NDArray[np.float32], Sequence[int], bool]] = []

    def chances(self, gaps: NDArray[np.float32]) -> NDArray[np.float64]:
        """The chance of each candidate: gaps [n, F], best first, to [n, F]; never rising."""
        self._count()
        cells = _cells(gaps)
        chances: NDArray[np.float64] = self._true.take(cells) / self._seen.take(cells)
        chances *= np.isfinite(gaps)  # not what top_k, top_p or min_p cut
        chances /= np.maximum(1.0, chances.sum(axis=1, keepdims=True))
        # A better rank is likelier; where few measurements say otherwise, they are noise.
        chances.sort(axis=1)
        return chances[:, ::-1]

    @property
    def acceptance(self) -> float:
        """The share of places where the best candidate is the true one."""
        self._count()
        return float(self._true[0].sum() / self._seen[0].sum())

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
            line = candidates[:, 0].tolist()
            n = min(len(line), len(truth), common_prefix_len(line, truth) + 1)
            gaps.append(their_gaps[:n])
            true.append(candidates[:n] == np.array(truth[:n])[:, None])
            if len(line) > 1 and line[0] == truth[0]:
                # A verified draft whose first token is accepted brings a second token.
                share = self._undrafted[hit]
                share[0] = 0.98 * share[0] + (len(truth) == 1)
                share[1] = 0.98 * share[1] + 1
        fading = np.where(self._seen > _PRIOR_WEIGHT, _KEPT ** len(self._noted), 1.0)
        self._noted.clear()
        cells = _cells(np.concatenate(gaps)).ravel()
        came = np.concatenate(true).ravel()
        size = _KINDS * _BUCKETS
        self._true *= fading
        self._true += np.bincount(cells, came, size).reshape(_KINDS, -1)
        self._seen *= fading
        self._seen += np.bincount(cells, minlength=size).reshape(_KINDS, -1)


def _cells(gaps: NDArray[np.float32]) -> NDArray[np.int64]:
    """Where the measurements of candidates are: gaps [n, F] to [n, F]."""
    buckets: NDArray[np.int64] = _EDGES.searchsorted(gaps)
    buckets[:, 0] = buckets[:, min(1, gaps.shape[1] - 1)]
    buckets += _FIRST_CELLS[: gaps.shape[1]]
    return buckets
