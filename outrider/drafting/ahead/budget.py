"""The number of outcomes to draft for, and of tokens for each, for all sessions at once.

With T the scorer's step, R the way there and back, f(M) a forward of M branches, h(M) the sum of
their chances, C the time of a draft made on demand and S what the round has taken so far and what
the host takes beside the loop, branches of k tokens are there A = S + k * f(M) + R after the last
output. One more forward finds the candidates at their ends. What comes late delays the next output,
too, which gives the branches after that a start: in the long run a round is longer by half of
A - T. So it takes

    max(T, (T + A) / 2, S + (k + 1) * f(M)) + (1 - h(M)) * (C + R)

and brings E(k) = 1 + a + .. + a^k tokens of acceptance a: short branches that come in time often
bring more per second than long ones that are waited for. M = 0 is drafting on demand. The shortest
of nearly equal choices is taken: what comes late may be waited for in vain.

Where the scorer goes on without the drafts of m sessions that miss, one batch has these and the
branches: then they have k tokens, too, and take k * f(m + M).

The loops are compiled, because NumPy takes longer to begin than these few numbers take. They share
this file, because Numba notices a changed file, not a changed callee elsewhere.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.cpu.compiled import compiled
from outrider.drafting.proposer import Pace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NEARLY = 0.95  # of the most tokens per second
_SLACK = 0.05  # of a step, by which drafting takes longer now and then


@dataclass(frozen=True, slots=True)
class Plans:
    """The outcomes of sessions that are worth a branch, each session's likeliest first."""

    chances: NDArray[np.float64]  # [sessions, B]; 0: no outcome, which come last
    outcomes: NDArray[np.int64]  # [sessions, B]: place a * F + r is outcome (a, r)

    def best(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sessions and outcomes of each session's `count` likeliest, the likeliest first.

        Of equally likely ones the first session's come first.
        """
        sessions, outcomes = _best(self.chances, self.outcomes, count)
        return sessions, outcomes


class Budget(NamedTuple):
    """The branches per session to draft ahead, and their tokens."""

    branches: int
    tokens: int


def plan_branches(
    chances: NDArray[np.float64],
    sizes: NDArray[np.int64],
    verified: NDArray[np.int64],
    budget: int,
    undrafted: NDArray[np.float64],
) -> Plans:
    """Return at most `budget` outcomes of each session.

    chances [places, F] are of the sessions' places, one session's `sizes` after the other's. Its
    first `verified` matter, and (size - 1, 0) stands for the guess that goes on.
    """
    best = np.zeros((len(sizes), budget))
    outcomes = np.zeros(best.shape, np.int64)
    _plan(chances, sizes, verified, undrafted, best, outcomes)
    return Plans(best, outcomes)


def choose_budget(
    plans: Plans,
    forward_s: Callable[[Floats], Floats],
    draft_s: float,
    pace: Pace,
    *,
    wanted: int,
    acceptance: float,
    joined: bool = False,
) -> Budget:
    """Return the budget of most tokens per second; without branches to draft on demand.

    Forwards of n branches take `forward_s(n)`, a draft of `wanted` tokens on demand `draft_s`.
    Drafts on demand that are `joined` with branches have as many tokens, and take as long.
    """
    forward = forward_s(_rows_of(plans.chances))
    if not forward.any():
        return Budget(len(forward), wanted)  # nothing was measured yet
    spent_s = pace.spent_s + pace.host_s + _SLACK * pace.step_s
    times = pace.step_s, pace.network_s, draft_s, spent_s
    return Budget(*_choose(plans.chances, forward, times, acceptance, wanted, joined))


@compiled
def _enter(best: Floats, outcomes: Ints, row: int, chance: float, outcome: int) -> None:
    """Enter an outcome into a row, the likeliest first; behind its equals, if there is room."""
    i = best.shape[1] - 1
    if i < 0 or chance <= best[row, i]:
        return
    while i > 0 and best[row, i - 1] < chance:
        best[row, i], outcomes[row, i] = best[row, i - 1], outcomes[row, i - 1]
        i -= 1
    best[row, i], outcomes[row, i] = chance, outcome


@compiled
def _plan(
    chances: Floats, sizes: Ints, verified: Ints, undrafted: Floats, best: Floats, outcomes: Ints
) -> None:
    """Fill `best` [sessions, B], which is zeros, and `outcomes` [sessions, B]."""
    first, num_ranks = 0, chances.shape[1]
    for i in range(len(sizes)):
        end = sizes[i] - 1
        last = min(verified[i], end)
        reached, goes_on = 1.0, 0.0
        for place in range(last + 1):
            drafted = (1.0 - undrafted[i]) * reached
            for rank in range(num_ranks):
                chance = drafted * chances[first + place, rank]
                if place == 0:
                    chance += undrafted[i] * chances[first, rank]
                if rank > 0 or place == end:
                    _enter(best, outcomes, i, chance, place * num_ranks + rank)
                else:
                    goes_on = chance
            reached *= chances[first + place, 0]
        if last < end:
            _enter(best, outcomes, i, goes_on, end * num_ranks)
        first += sizes[i]


@compiled
def _best(chances: Floats, outcomes: Ints, count: int) -> tuple[Ints, Ints]:
    """Return what `Plans.best` does."""
    num_sessions, count = len(chances), min(count, chances.shape[1])
    kept = np.empty(num_sessions * count)
    sessions = np.empty(len(kept), np.int64)
    chosen = np.empty(len(kept), np.int64)
    n = 0
    for session in range(num_sessions):
        for i in range(count):
            if chances[session, i] > 0.0:
                kept[n] = -chances[session, i]
                sessions[n], chosen[n] = session, outcomes[session, i]
                n += 1
    order = kept[:n].argsort(kind="mergesort")
    return sessions[order], chosen[order]


@compiled
def _rows_of(chances: Floats) -> Floats:
    """Return the rows of 1, 2, ... branches per session, up to the most that some session has."""
    rows = np.zeros(chances.shape[1])
    total = 0.0
    for i in range(len(rows)):
        for session in range(len(chances)):
            total += chances[session, i] > 0.0
        rows[i] = total
        if total == (rows[i - 1] if i else 0.0):
            return rows[:i]
    return rows


@compiled
def _choose(
    chances: Floats,
    forward_s: Floats,
    times: tuple[float, float, float, float],
    acceptance: float,
    wanted: int,
    joined: bool,
) -> tuple[int, int]:
    """Return the shortest of nearly the best choices of branches M, from 0 on, and tokens k.

    `times` are those of the step, the network, a draft, and what is spent.
    """
    step_s, network_s, draft_s, spent_s = times
    tokens = np.ones(wanted + 1)  # E(0), E(1), ...
    for k in range(1, wanted + 1):
        tokens[k] = tokens[k - 1] + acceptance**k
    best, choice = np.zeros(wanted + 1), np.zeros(wanted + 1, np.int64)  # by k
    best[wanted] = tokens[wanted] / (step_s + draft_s + network_s)
    hits = 0.0
    for i in range(len(forward_s)):
        for session in range(len(chances)):
            hits += chances[session, i] / len(chances)
        misses = 1.0 - hits
        for k in range(1, wanted + 1):
            drafting = k * forward_s[i]
            ahead = drafting + (network_s + spent_s)
            busy = (k + 1) * forward_s[i] + spent_s
            round_s = max(max((step_s + ahead) / 2, step_s), busy)
            missed_s, missed = (drafting, tokens[k]) if joined else (draft_s, tokens[wanted])
            rate = (hits * tokens[k] + misses * missed) / (
                round_s + misses * (missed_s + network_s)
            )
            if rate > best[k]:
                best[k], choice[k] = rate, i + 1
    enough = 0.0
    for rate in best:
        enough = max(enough, _NEARLY * rate)
    shortest = 1
    while best[shortest] < enough:
        shortest += 1
    return choice[shortest], shortest
