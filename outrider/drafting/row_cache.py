"""The keys and values that a draft module holds of one session's true rows, and rows to feed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.drafting.draft_steps import ReadyRow
from outrider.drafting.feature_session import FeatureSession
from outrider.engine.batch import RowSlice
from outrider.engine.block_pool import ROOT_HASH, BlockPool, PageHash, page_hash
from outrider.engine.constraint import ConstraintEditor


class RowCache:
    """A session's pages. Row p is a function of the tokens up to p + 1, so pages are shared by
    these: one with rows a, ..., b by the tokens up to b + 1.
    """

    __slots__ = ("block_table", "computed", "hashes")

    def __init__(self) -> None:
        self.block_table: list[int] = []
        self.computed = 0  # rows with true states; what follows them in the pages is of no use
        self.hashes: list[PageHash] = []  # of the full pages that are shared or published

    def adopt(self, pool: BlockPool, tokens: list[int], page_size: int) -> None:
        """Begins with what other sessions left of the same prefix."""
        self._hash(tokens, (len(tokens) - 2) // page_size, page_size)
        self.block_table = pool.match(self.hashes)
        pool.share(self.block_table)
        del self.hashes[len(self.block_table) :]
        self.computed = len(self.block_table) * page_size

    def publish(self, pool: BlockPool, tokens: list[int], page_size: int) -> None:
        """Shares the full pages; not the one of the last row, which may be fed again."""
        known = len(self.hashes)
        self._hash(tokens, min(self.computed, len(tokens) - 2) // page_size, page_size)
        for page, key in zip(self.block_table[known:], self.hashes[known:], strict=False):
            pool.publish(page, key)

    def drop(self, pool: BlockPool) -> None:
        """Forgets all; the pages are free."""
        pool.release(self.block_table)
        self.block_table, self.hashes, self.computed = [], [], 0

    def _hash(self, tokens: list[int], num_pages: int, page_size: int) -> None:
        for i in range(len(self.hashes), num_pages):
            parent = self.hashes[-1] if self.hashes else page_hash(ROOT_HASH, tokens[:1])
            self.hashes.append(
                page_hash(parent, tokens[i * page_size + 1 : (i + 1) * page_size + 1])
            )


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A session's part in one round."""

    state: FeatureSession
    cache: RowCache
    num_rows: int  # true rows fed
    wanted: int  # draft tokens; 0: the prompt is not through yet
    mask: ConstraintEditor | None  # stands after the committed text; used up
    chain: bool  # the draft has one path
    num_guessed: int  # rows fed past the true ones at most

    @property
    def end(self) -> int:
        return self.cache.computed + self.num_rows

    @property
    def sampled(self) -> bool:
        """The draft is drawn with noise of its own."""
        return self.state.samples and self.wanted > 0

    @property
    def length(self) -> int:
        return len(self.state.follower.tokens)

    def slice(self) -> RowSlice:
        start = self.cache.computed
        tokens = self.state.follower.tokens[start + 1 : self.end + 1]
        return RowSlice(tokens, start, self.cache.block_table, 1)

    def features(self) -> Tensor:
        """The states of the slice's tokens: bfloat16 [num_rows, width] on the host."""
        return self.state.rows(self.cache.computed, self.end)

    def ready(self) -> ReadyRow:
        """For a row that drafts."""
        return ReadyRow(self.length, self.wanted, self.state.follower.sampling, self.mask)


def inputs_of(rows: list[HeadRow]) -> tuple[list[RowSlice], list[Tensor], list[ReadyRow]]:
    """What a `HeadDrafter` takes."""
    ready = [row.ready() for row in rows if row.wanted]
    return [row.slice() for row in rows], [row.features() for row in rows], ready
