"""Texts in which the continuations of a context are found, growing at one end, shrinking at the
other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider.drafting import suffix_kernels as kernels
from outrider.drafting.suffix_kernels import END, ORDERS, Ints

_SMALLEST = 256
_MAX_ROOM = 4  # times what is held; beyond, memory is given back
NO_PATH: Ints = np.empty(0, np.int32)


class Found(NamedTuple):
    """A continuation and the sum of its tokens' estimated probabilities."""

    score: float
    token_ids: list[int]


NOTHING = Found(0.0, [])


class SuffixIndex:
    """Token ids with links from each place to the last one that was preceded by the same tokens.

    Takes 36 bytes per token that there is room for, and has room for at most four times what it
    holds.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._start = self._end = 0  # of what counts in _tokens
        self._make_arrays(len(tokens))
        self.append(tokens)

    def __len__(self) -> int:
        return self._end - self._start

    def append(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        if self._end + len(tokens) > len(self._tokens):
            self._move(len(tokens))
        end = self._end + len(tokens)
        self._tokens[self._end : end] = tokens
        kernels.enter(self._tokens, self._links, self._heads, self._start, self._end, end)
        self._end = end

    def end_document(self) -> None:
        """What comes next does not follow what came before."""
        self.append((END,))

    def drop(self, num_tokens: int) -> None:
        """Forgets the first tokens."""
        self._start += num_tokens
        if _SMALLEST < len(self._tokens) > _MAX_ROOM * len(self):
            self._move(0)

    def draft(
        self,
        context: Ints,
        wanted: int,
        *,
        factor: float,
        min_prob: float,
        path: Ints = NO_PATH,
        own: bool = False,
    ) -> Found:
        """See `suffix_kernels.best_draft`."""
        draft = np.empty(wanted, np.int32)
        score, length = kernels.best_draft(
            self._tokens,
            self._links,
            self._heads,
            self._start,
            self._end,
            context,
            path,
            own,
            wanted,
            factor,
            min_prob,
            draft,
        )
        return Found(score, draft[:length].tolist())

    def next_tokens(
        self, context: Ints, count: int, *, path: Ints = NO_PATH, own: bool = False
    ) -> list[int]:
        """See `suffix_kernels.next_tokens`."""
        found = np.empty(count, np.int32)
        length = kernels.next_tokens(
            self._tokens,
            self._links,
            self._heads,
            self._start,
            self._end,
            context,
            path,
            own,
            found,
        )
        return [int(token) for token in found[:length]]

    def _move(self, extra: int) -> None:
        """Makes room for `extra` tokens in new arrays, without the tokens that were dropped."""
        kept = self._tokens[self._start : self._end]
        self._start, self._end = 0, len(kept)
        self._make_arrays(len(kept) + extra)
        self._tokens[: len(kept)] = kept
        kernels.enter(self._tokens, self._links, self._heads, 0, 0, len(kept))

    def _make_arrays(self, num_tokens: int) -> None:
        capacity = max(_SMALLEST, 1 << (num_tokens * 5 // 4).bit_length())
        self._tokens = np.empty(capacity, np.int32)
        self._links = np.empty((ORDERS, capacity), np.int32)
        self._heads = np.full((ORDERS, capacity), -1, np.int32)
