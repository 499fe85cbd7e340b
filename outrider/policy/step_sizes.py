"""How many tokens a step really runs: captured steps are filled up to the next size."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class StepSizes:
    """The sizes of captured steps, as (rows, tokens).

    A size of as many tokens as rows is for steps in which each row has one. Any other is for steps
    of at most so many rows and tokens. Without sizes a step runs what it has.
    """

    def __init__(self, sizes: Iterable[tuple[int, int]] = ()) -> None:
        self._sizes = sorted(sizes, key=lambda size: size[1])
        self._by_rows: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def run(self, num_rows: int, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the tokens that steps of `num_rows` rows run, given in any shape."""
        single, longer = self._by_rows.get(num_rows) or self._find(num_rows)
        several = longer[np.searchsorted(longer, num_tokens)]
        filled = np.where(num_tokens <= num_rows, single, several)
        return np.where(np.isinf(filled), num_tokens, filled)

    def _find(self, num_rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the size of rows of one token, and the others in order; both end in infinity."""
        fitting = [size for size in self._sizes if size[0] >= num_rows]
        single = next((float(tokens) for rows, tokens in fitting if rows == tokens), np.inf)
        longer = [float(tokens) for rows, tokens in fitting if tokens > rows]
        found = np.array(single), np.array([*longer, np.inf])
        self._by_rows[num_rows] = found
        return found
