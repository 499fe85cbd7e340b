"""Choose the draft tokens that a step verifies, once over all its rows.

A step of `rows` rows that verifies n draft tokens takes t(rows + n) seconds. Each row commits one
token in any case, and a draft token more if the walk of accepted tokens reaches it. So the chosen
nodes maximise

    (rows + sum of the chosen survivals) / t(rows + number of chosen nodes)

A child survives at most as often as its parent. So the best n nodes are the n likeliest ones, and
they contain the parents of all of them. That holds whatever shape t() has.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

StepTime = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Seconds of steps by their numbers of tokens."""


def choose_nodes(
    survivals: NDArray[np.float64], parents: NDArray[np.int64], step_time: StepTime, rows: int
) -> NDArray[np.bool_]:
    """Return which nodes of all drafts a step of `rows` rows verifies.

    `survivals` [num_nodes] are the probabilities that the accepted tokens reach each node, and
    `parents` [num_nodes] the indices of the nodes before them, -1 for a draft's first tokens.

    Under rejection sampling a text keeps the target's distribution only if no survival depends on
    the draft's own tokens from that node on.

    Raises `ValueError` if a parent comes after its child or survives less often.
    """
    above = np.where(parents < 0, np.inf, survivals[parents])
    if (survivals > above).any() or (parents >= np.arange(len(parents))).any():
        raise ValueError("A node must come after its parent and survive at most as often.")
    seconds = step_time(np.arange(rows, rows + len(survivals) + 1))
    return choose_likeliest(survivals, np.sort(survivals)[::-1], seconds, rows)


def choose_likeliest(
    survivals: NDArray[np.float64],
    likeliest: NDArray[np.float64],
    seconds: NDArray[np.float64],
    rows: float,
) -> NDArray[np.bool_]:
    """Return which nodes a step of `rows` rows verifies, parents among those as likely first.

    `likeliest` are the `survivals` [n] from the highest to the lowest, and `seconds` [n + 1] the
    times of steps that verify 0, 1 .. n nodes.
    """
    committed = np.empty(len(seconds))
    committed[0] = rows
    np.cumsum(likeliest, out=committed[1:])
    committed[1:] += rows
    count = int((committed / seconds).argmax())
    if count in (0, len(survivals)):
        return np.full(len(survivals), count > 0)
    least = likeliest[count - 1]
    chosen: NDArray[np.bool_] = survivals >= least
    if surplus := np.count_nonzero(chosen) - count:
        chosen[np.flatnonzero(survivals == least)[-surplus:]] = False
    return chosen
