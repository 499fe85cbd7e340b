"""Choose the draft tokens that a step verifies, once over all its rows.

Each row commits one token in any case, and a draft token more if the walk of accepted tokens
reaches it. So the chosen nodes maximise, with t() the seconds of a step by its tokens,

    (rows + sum of the chosen survivals) / t(rows + number of chosen nodes)

A child survives at most as often as its parent. So whatever shape t() has, the best n nodes are the
n likeliest ones, and they contain the parents of all of them.

Under rejection sampling a text keeps the target's distribution only if no survival depends on the
draft's own tokens from that node on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose_nodes(
    survivals: NDArray[np.float64], seconds: NDArray[np.float64], rows: float
) -> tuple[NDArray[np.bool_], float]:
    """Return which nodes of all drafts a step of `rows` rows verifies, and its tokens a second.

    `survivals` [n] are the probabilities that the accepted tokens reach each node, parents before
    children. `seconds` [n + 1] are the times of steps that verify 0, 1 .. n nodes.
    """
    likeliest = np.sort(nodes := survivals.astype(np.float32))[::-1]  # float64 takes twice as long
    speeds = np.concatenate(((rows,), likeliest)).cumsum() / seconds
    count = int(speeds.argmax())
    least = likeliest[count - 1] if count else np.inf
    chosen = nodes > least
    chosen[np.flatnonzero(nodes == least)[: count - np.count_nonzero(chosen)]] = True
    return chosen, float(speeds[count])
