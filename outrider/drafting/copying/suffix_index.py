"""Texts in which the continuations of a context are found, growing at one end, shrinking at the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider.drafting.copying import suffix_kernels as kernels
from outrider.drafting.copying.suffix_kernels import END, ORDERS, Ints

_SMALLEST = 256
_MAX_ROOM = 4  # times what is held; beyond, memory is given back
_MAX_PLACE = 2**31 - 1  # as links hold them
NO_PATH: Ints = np.empty(0, np.int32)


class Found(NamedTuple):
    """A continuation and the sum of its tokens' estimated probabilities."""

    score: float
    token_ids: list[int]


NOTHING = Found(0.0, [])


class SuffixIndex:
    """Token ids with links from each place to the last one that was preceded by the same tokens.

    Takes 36 bytes per token that there is room for, and has room for at most four times what it
    holds. What is dropped leaves its room to what comes: nothing is moved.
    """

    def __init__(self, tokens: Sequence[int] | Ints = ()) -> None:
        self._begin(tokens)

    def _begin(self, tokens: Sequence[int] | Ints) -> None:
        """Hold just these, in new arrays."""
        self._start = self._end = 0  # of the places that count
        room = _room(len(tokens))
        self._tokens: Ints = np.empty(room, np.int32)
        self._links: Ints = np.empty((ORDERS, room), np.int32)
        self._heads: Ints = np.full((ORDERS, room), -1, np.int32)
        self.append(tokens)

    def __len__(self) -> int:
        return self._end - self._start

    def append(self, tokens: Sequence[int] | Ints) -> None:
        """The text goes on."""
        if self._end + len(tokens) > _MAX_PLACE:
            self._begin(self._held())
        copies = _room(len(self) + len(tokens)) // len(self._tokens)
        if copies > 1:
            # A place finds itself in one of the copies, an n-gram the head of its old slot.
            self._tokens = np.tile(self._tokens, copies)
            self._links = np.tile(self._links, copies)
            self._heads = np.tile(self._heads, copies)
        fresh = np.array(tokens, np.int32)
        kernels.enter(fresh, self._tokens, self._links, self._heads, self._start, self._end)
        self._end += len(fresh)

    def end_document(self) -> None:
        """What comes next does not follow what came before."""
        self.append((END,))

    def drop(self, num_tokens: int) -> None:
        """Forgets the first tokens."""
        self._start += num_tokens
        if _SMALLEST < len(self._tokens) > _MAX_ROOM * len(self):
            self._begin(self._held())

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

    def _held(self) -> Ints:
        held: Ints = self._tokens[np.arange(self._start, self._end) % len(self._tokens)]
        return held


def _room(num_tokens: int) -> int:
    """A power of two."""
    return max(_SMALLEST, 1 << (num_tokens - 1).bit_length())
