"""The shapes of captured decode and verification steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)  # then every 64th; of one token each
_FEWEST_RAGGED = 64  # tokens: a step of fewer takes hardly longer than a step of one
_SHARES = (0.25, 0.5, 1.0)  # of the draft tokens; three quarters of R rows are a quarter of 2 R
_TREE_SHARES = (0.5, 1.0)  # trees are rarely cut


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a captured step."""

    query_len: int  # tokens of a row at most
    rows: int
    trees: bool = False  # rows hold trees or chains
    tokens: int = 0  # in all, at least `rows`; 0: `query_len` in each row

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", self.tokens or self.rows * self.query_len)

    @property
    def full(self) -> bool:
        """Tell whether each row, with its padding, has `query_len` tokens."""
        return self.tokens == self.rows * self.query_len

    @property
    def cost(self) -> tuple[int, ...]:
        """Return a key that orders buckets by the time of their steps."""
        return (self.tokens, self.rows, self.query_len, not self.trees)


def make_buckets(
    max_num_seqs: int, query_lens: Sequence[int], tree_lens: Sequence[int] = ()
) -> list[Bucket]:
    """Return all buckets for up to `max_num_seqs` rows, smallest first; `tree_lens` with trees.

    Rows of one token have a bucket for each of many numbers of rows. Longer rows have them for
    powers of two, since a bucket holds fewer rows that are longer, too.
    """
    sizes = (*_ROWS, *range(128, max_num_seqs, 64))
    shapes = {(q, False) for q in query_lens} | {(q, True) for q in tree_lens}
    buckets: set[Bucket] = set()
    for query_len, trees in shapes:
        if query_len == 1:
            rows = (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
            buckets |= {Bucket(1, n, trees) for n in rows}
            continue
        for n in (*(1 << i for i in range((max_num_seqs - 1).bit_length())), max_num_seqs):
            shares = _TREE_SHARES if trees else _SHARES
            if n == max_num_seqs and not trees:
                shares = (*shares, 0.75)
            for share in shares:
                tokens = 8 * math.ceil(n * (1 + share * (query_len - 1)) / 8)
                if share == 1.0:
                    buckets.add(Bucket(query_len, n, trees))
                elif _FEWEST_RAGGED <= tokens < n * query_len:
                    buckets.add(Bucket(query_len, n, trees, tokens))
    return sorted(buckets, key=lambda bucket: bucket.cost)
