"""Choose the draft tokens that a step verifies, once over all its rows.

Each row commits one token in any case, and a draft token more if the walk of accepted tokens
reaches it. So the chosen nodes maximise, with t() the seconds of a step by its tokens,

    (rows + sum of the chosen survivals) / t(rows + number of chosen nodes)

A child survives at most as often as its parent. So whatever shape t() has, the best n nodes are the
n likeliest ones, and they contain the parents of all of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose_nodes(
    survivals: NDArray[np.float64],
    likeliest: NDArray[np.float64],
    seconds: NDArray[np.float64],
    rows: float,
) -> NDArray[np.bool_]:
    """Return which nodes of all drafts a step of `rows` rows verifies, of equal ones the first.

    `survivals` are the probabilities that the accepted tokens reach each of n nodes, in any shape,
    parents before children. `likeliest` [n] are the same from the highest to the lowest, and
    `seconds` [n + 1] the times of steps that verify 0, 1 .. n nodes.

    Under rejection sampling a text keeps the target's distribution only if no survival depends on
    the draft's own tokens from that node on.
    """
    committed = rows + np.concatenate(((0.0,), likeliest.cumsum()))
    count = int((committed / seconds).argmax())
    least = likeliest[count - 1] if count else np.inf
    chosen: NDArray[np.bool_] = survivals > least
    equal = np.flatnonzero(survivals == least)
    chosen.flat[equal[: count - np.count_nonzero(chosen)]] = True
    return chosen
