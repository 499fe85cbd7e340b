"""Which outcomes of a verification to draft for ahead of it: the likeliest, by measurement.

A draft c1 .. cK is verified. Outcome (a, r): its first `a` tokens are accepted, and the target's
next token is the one that the draft ranks r-th there (r = 0, 1, ...; at a < K without the rejected
c_{a+1}). With acceptance[i] the chance that c_{i+1} is true if those before it are,

    P(a, r) = acceptance[0] ... acceptance[a-1] * (1 - acceptance[a]) * recovered[r]    for a < K
    P(K, r) = acceptance[0] ... acceptance[K-1] * bonus[r]

A row may also go on without its draft, as it does when the draft is late after a miss. Then one
token is decided, c1 or an alternative to it; with `undrafted` the share of such rounds,

    P'(a, r) = (1 - undrafted) * P(a, r) + undrafted * [a = 0] * (1 - acceptance[0]) * recovered[r]

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

from outrider.types import common_prefix_len

NUM_RANKS = 4  # alternatives that are told apart at each depth
_FADE = 0.98  # per observed round of a counter's own kind
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_RECOVERED = (0.6, 0.2, 0.08, 0.04)
_PRIOR_BONUS = (0.8, 0.1, 0.04, 0.02)
_PRIOR_UNDRAFTED = 0.1
_PRIOR_WEIGHT = 8.0  # rounds


class Outcome(NamedTuple):
    """`accepted` tokens of the draft come true, and then the token ranked `rank` there."""

    accepted: int
    rank: int
    chance: float


@dataclass(frozen=True, slots=True)
class Pace:
    """What drafting ahead is to be hidden behind, as measured. Zeros: not known yet."""

    step_s: float = 0.0  # the scorer's step
    network_s: float = 0.0  # the way to the scorer and back


NO_PACE = Pace()


@dataclass(frozen=True, slots=True)
class OutcomeRates:
    """What was measured: all that a plan depends on."""

    acceptance: tuple[float, ...]  # by depth; the last holds for all that is deeper
    recovered: tuple[float, ...]  # by rank, after a rejection
    bonus: tuple[float, ...]  # by rank, after full acceptance
    undrafted: float = 0.0


def plan_branches(rates: OutcomeRates, budget: int, k: int) -> tuple[Outcome, ...]:
    """At most `budget` outcomes of a draft of `k` tokens, the likeliest first."""
    outcomes: list[Outcome] = []
    reached = 1.0
    for a in range(k):
        accepted = rates.acceptance[min(a, len(rates.acceptance) - 1)]
        missed = (1.0 - rates.undrafted) * reached * (1.0 - accepted)
        if a == 0:
            missed += rates.undrafted * (1.0 - accepted)
        outcomes += [Outcome(a, r, missed * p) for r, p in enumerate(rates.recovered)]
        reached *= accepted
    reached *= 1.0 - rates.undrafted
    outcomes += [Outcome(k, r, reached * p) for r, p in enumerate(rates.bonus)]
    outcomes.sort(key=lambda outcome: -outcome.chance)
    return tuple([outcome for outcome in outcomes[: max(0, budget)] if outcome.chance > 0.0])


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


class _Share:
    """A fading share of successes, with a prior."""

    __slots__ = ("successes", "trials")

    def __init__(self, prior: float) -> None:
        self.successes, self.trials = prior * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    def add(self, success: bool) -> None:
        self.successes = _FADE * self.successes + success
        self.trials = _FADE * self.trials + 1

    @property
    def value(self) -> float:
        return self.successes / self.trials


class Acceptance:
    """Acceptance by depth, fading; of one session, which begins as all of `parent`'s are."""

    def __init__(self, parent: Acceptance | None = None) -> None:
        self._parent = parent
        self._depths: list[_Share] = []

    def at(self, depth: int) -> float:
        """The chance that the token at `depth` is true if those before it are."""
        return self._share(depth).value

    def add(self, depth: int, accepted: bool) -> None:
        self._share(depth).add(accepted)
        if self._parent is not None:
            self._parent.add(depth, accepted)

    def _share(self, depth: int) -> _Share:
        while len(self._depths) <= depth:
            parent = self._parent
            prior = _PRIOR_ACCEPTANCE if parent is None else parent.at(len(self._depths))
            self._depths.append(_Share(prior))
        return self._depths[depth]


class Outcomes:
    """Measures `OutcomeRates` of a proposer from what it drafted and what then came true."""

    def __init__(self) -> None:
        self._acceptance = Acceptance()
        self._recovered = [_Share(p) for p in _PRIOR_RECOVERED]
        self._bonus = [_Share(p) for p in _PRIOR_BONUS]
        self._undrafted = {hit: _Share(_PRIOR_UNDRAFTED) for hit in (False, True)}

    def session(self) -> Acceptance:
        """To be kept with a new session."""
        return Acceptance(self._acceptance)

    def rates(self, session: Acceptance, k: int, *, hit: bool) -> OutcomeRates:
        """For a draft of `k` tokens that was at hand when it was wanted (`hit`), or was not."""
        return OutcomeRates(
            tuple([session.at(depth) for depth in range(k)]),
            # A better rank is likelier; where few measurements say otherwise, they are noise.
            tuple(sorted([share.value for share in self._recovered], reverse=True)),
            tuple(sorted([share.value for share in self._bonus], reverse=True)),
            self._undrafted[hit].value,
        )

    def observe(
        self,
        session: Acceptance,
        chain: Sequence[int],
        alternatives: Sequence[int],
        committed: Sequence[int],
        *,
        hit: bool,
    ) -> None:
        """`committed` followed where `chain` was guessed; `hit` as for `rates`.

        `alternatives` are the tokens ranked 0, 1, ... where `committed` leaves the chain.
        """
        accepted = common_prefix_len(chain, committed)
        for depth in range(accepted):
            session.add(depth, True)
        if accepted < min(len(chain), len(committed)):
            session.add(accepted, False)
        if accepted < len(committed):
            ranks = self._bonus if accepted == len(chain) else self._recovered
            for share, token in zip(ranks, alternatives, strict=False):
                share.add(token == committed[accepted])
        if accepted and len(chain) > 1:
            # A verified draft whose first token is accepted brings a second token.
            self._undrafted[hit].add(len(committed) == 1)
