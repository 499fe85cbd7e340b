"""Measured chances of the outcomes of a verification, for drafts made ahead of it.

A proposer guesses c1 .. cn, and knows F candidates at each of these n places; the scorer verifies
the first v of them. Outcome (a, r): c1 .. ca come true, and then the candidate ranked r-th there,
where c_{a+1} itself is r = 0. With chances[a][r] the chance that this candidate is the true one
after `a` true tokens,

    P(a, r) = chances[0][0] ... chances[a-1][0] * chances[a][r]      (r > 0, a <= v)

Where nothing is refused the guess must go on past its end: that is outcome (n - 1, 0), one branch
too. Its chance is that of all that is verified and, if it is known, of the token after that.

A candidate's chance is measured by its rank and its gap, the distance of its score (the logit over
the temperature, plus the request's noise) from the best. The best's own is taken by the gap of the
runner-up. So a place where the draft hesitates gets branches, and one where it does not, none.

A row may also go on without its draft, as it does when the draft is late after a miss. Then one
token is decided, c1 or an alternative to it; with `undrafted` the share of such rounds,

    P'(a, r) = (1 - undrafted) * P(a, r) + undrafted * [a = 0] * chances[0][r]

Outcomes exclude one another and each costs one branch, so the best use of a budget is to take the
likeliest ones. `budget` chooses their number.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.averages import Average
from outrider.drafting.cpu.compiled import compiled
from outrider.drafting.drafters import Forks
from outrider.types import common_prefix_len

_EDGES = np.array((0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10), np.float32)
_KINDS = 4  # ranks 0, 1, 2, and beyond
_BUCKETS = len(_EDGES) + 1
_KEPT = 0.998  # per round, of what was measured
_PRIOR_WEIGHT = 4.0  # candidates of each kind and gap
_PRIOR_UNDRAFTED = 0.1
_PRIOR_ACCEPTANCE = 0.8
_RECENT_ROUNDS = 64.0  # of all sessions: what texts accept changes at once with their kind
_MAX_NOTED = 1024  # rounds, of which the ones before would have faded to an eighth


class Outcomes:
    """Measures the chances of candidates from what was drafted and what then came true."""

    def __init__(self) -> None:
        # Before anything is measured, chances fall with the gap as a softmax's do.
        middle = np.concatenate((_EDGES, (12.0,)))
        fall = np.exp(-middle)
        prior = np.stack((1.0 - 0.5 * fall, 0.4 * fall, 0.3 * fall, 0.2 * fall))
        self._true = _PRIOR_WEIGHT * prior  # by kind and bucket; a cell is a place in that order
        self._seen = np.full((_KINDS, _BUCKETS), _PRIOR_WEIGHT)
        self._accepted = Average(_RECENT_ROUNDS, mean=_PRIOR_ACCEPTANCE)
        self._undrafted = {hit: [_PRIOR_UNDRAFTED * 8, 8.0] for hit in (False, True)}
        self._noted = deque[tuple[Forks, Sequence[int], bool]](maxlen=_MAX_NOTED)

    def chances(self, gaps: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the chances [n, F] of candidates with gaps [n, F], best first; they never rise."""
        chances = np.empty(gaps.shape)
        _chances(gaps, _EDGES, self._true.ravel(), self._seen.ravel(), chances)
        return chances

    @property
    def acceptance(self) -> float:
        """The share of places where the best candidate was the true one in the last rounds."""
        return self._accepted.mean

    def undrafted(self, *, hit: bool) -> float:
        """Return the share of rounds that verified no draft, though (`hit`) it was at hand."""
        successes, trials = self._undrafted[hit]
        return successes / trials

    def observe(self, forks: Forks, truth: Sequence[int], *, hit: bool) -> None:
        """Note that `truth` followed where these of one row were drafted.

        `count` counts it in spare time: somebody may wait for the draft after a commit.
        """
        self._noted.append((forks, truth, hit))

    def count(self) -> None:
        """Count what was noted, up to the first place where each draft was wrong."""
        if not self._noted:
            return
        gaps: list[NDArray[np.float32]] = []
        candidates: list[NDArray[np.int32]] = []
        tokens: list[int] = []
        for forks, truth, hit in self._noted:
            line = forks.candidates[:, 0].tolist()
            met = common_prefix_len(line, truth)
            n = min(len(line), len(truth), met + 1)
            self._accepted.add(met / n, n)
            gaps.append(forks.gaps[:n])
            candidates.append(forks.candidates[:n])
            tokens += truth[:n]
            if len(line) > 1 and line[0] == truth[0]:
                # A verified draft whose first token is accepted brings a second token.
                share = self._undrafted[hit]
                share[0] = 0.98 * share[0] + (len(truth) == 1)
                share[1] = 0.98 * share[1] + 1
        fading = np.where(self._seen > _PRIOR_WEIGHT, _KEPT ** len(self._noted), 1.0)
        self._noted.clear()
        cells = _cells(np.concatenate(gaps), _EDGES).ravel()
        came = (np.concatenate(candidates) == np.array(tokens)[:, None]).ravel()
        size = _KINDS * _BUCKETS
        self._true *= fading
        self._true += np.bincount(cells, came, size).reshape(_KINDS, -1)
        self._seen *= fading
        self._seen += np.bincount(cells, minlength=size).reshape(_KINDS, -1)


@compiled
def _cells(gaps: NDArray[np.float32], edges: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the cells, by kind and bucket, in which candidates with gaps [n, F] are measured."""
    num_ranks, cells = gaps.shape[1], np.empty(gaps.shape, np.int64)
    for place in range(len(gaps)):
        for rank in range(num_ranks):
            gap, bucket = gaps[place, max(rank, min(1, num_ranks - 1))], 0
            while bucket < len(edges) and edges[bucket] < gap:
                bucket += 1
            cells[place, rank] = min(rank, _KINDS - 1) * _BUCKETS + bucket
    return cells


@compiled
def _chances(
    gaps: NDArray[np.float32],
    edges: NDArray[np.float32],
    true: NDArray[np.float64],
    seen: NDArray[np.float64],
    chances: NDArray[np.float64],
) -> None:
    """Fill `chances` [n, F] by what was counted in each cell."""
    cells = _cells(gaps, edges)
    for place in range(len(gaps)):
        row, total = chances[place], 0.0
        for rank in range(gaps.shape[1]):
            # A better rank is likelier; where few measurements say otherwise, they are noise.
            chance, i = 0.0, rank
            if np.isfinite(gaps[place, rank]):  # not what top_k, top_p or min_p cut
                cell = cells[place, rank]
                chance = true[cell] / seen[cell]
            while i > 0 and row[i - 1] < chance:
                row[i] = row[i - 1]
                i -= 1
            row[i] = chance
            total += chance
        for rank in range(gaps.shape[1]):
            row[rank] /= max(1.0, total)
