"""Tell how sure a draft token is, in a byte, as `Block.confidences` defines it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray


def confidences_of(gaps: NDArray[np.float32]) -> bytes:
    """Return the confidences of drafted tokens by how far each is ahead of the runner-up.

    `gaps`, of any shape, are distances in the scores from which a token is drawn: tempered logits
    with the request's noise. The target draws the same token about as likely as 1 - exp(-gap); the
    scorer measures how likely that is.
    """
    with np.errstate(divide="ignore", over="ignore"):
        return _as_bytes(np.log(np.expm1(gaps)))


def confidences_of_log_probs(log_probs: NDArray[np.floating]) -> bytes:
    """Return the confidences of tokens by their log probabilities, of any shape."""
    with np.errstate(divide="ignore"):
        return _as_bytes(log_probs - np.log(-np.expm1(log_probs)))


@lru_cache(maxsize=4096)
def confidences_of_match(length: int, count: int) -> bytes:
    """Return the confidences of `count` tokens copied from after a match of `length` tokens.

    A token that is right makes the match longer. The odds are its length squared.
    """
    return confidences_of_odds(np.arange(length, length + count) ** 2.0)


def confidences_of_odds(odds: NDArray[np.floating]) -> bytes:
    """Return the confidences of tokens by their odds, which are above 0."""
    return _as_bytes(np.log(odds))


def by_row(confidences: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Return the confidences of rows of these sizes, which follow one another."""
    ends = [*accumulate(sizes, initial=0)]
    return [confidences[start:end] for start, end in pairwise(ends)]


def _as_bytes(log_odds: NDArray[np.floating]) -> bytes:
    values: NDArray[np.floating] = np.rint(128.0 + 16.0 * log_odds)
    told: NDArray[np.uint8] = np.minimum(np.maximum(values, 1), 255).astype(np.uint8)
    return told.tobytes()
