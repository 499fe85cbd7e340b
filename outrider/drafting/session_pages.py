"""The pages in which a drafting model keeps one session's keys and values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.engine.kv_cache.block_pool import BlockPool, PageHash, extend_hashes
from outrider.engine.kv_cache.pools import KVPools
from outrider.errors import ConfigError

_OF_USE = 64  # tokens


def longest_session(max_model_len: int, pools: KVPools, num_fed: int, num_taken: int = 0) -> int:
    """Return the longest text that can be drafted for, with `num_fed` slots for guesses after it.

    `num_taken` of the pages are of another use. Raises `ConfigError` if there is no room for one.
    """
    room = (pools.num_pages - num_taken) * pools.page_size - num_fed
    if room < min(max_model_len, _OF_USE):
        raise ConfigError(
            f"{pools.num_pages} pages of {pools.page_size} tokens hold no session of use: "
            "give the draft module more KV-cache memory."
        )
    return min(max_model_len, room)


class PageCache:
    """A session's pages; full ones are shared by sessions of the same text.

    Row p of the pages is a function of the tokens up to p + `lead`.
    """

    __slots__ = ("_lead", "block_table", "computed", "hashes")

    def __init__(self, lead: int = 0) -> None:
        self._lead = lead
        self.block_table = array("i")  # not a list: it is copied whole in every round
        self.computed = 0  # true rows; those after them are guesses, or of no use
        self.hashes: list[PageHash] = []  # of the full pages that are shared or published

    def adopt(self, pool: BlockPool, tokens: Sequence[int], page_size: int) -> None:
        """Begin with the pages that other sessions left of the same prefix."""
        num_pages = (len(tokens) - 1 - self._lead) // page_size
        extend_hashes(self.hashes, tokens, num_pages, page_size, self._lead)
        pages = pool.match(self.hashes)
        pool.share(pages)
        self.block_table.extend(pages)
        del self.hashes[len(pages) :]
        self.computed = len(pages) * page_size

    def cover(self, pool: BlockPool, num_rows: int, page_size: int) -> bool:
        """Take pages for so many rows; return False, and take none, if too few are free."""
        if num_rows > len(self.block_table) * page_size:
            missing = -(-num_rows // page_size) - len(self.block_table)
            if missing > pool.num_free:
                return False
            self.block_table.extend(pool.take(missing))
        return True

    def publish(self, pool: BlockPool, tokens: Sequence[int], page_size: int) -> None:
        """Share the full pages, but not that of the last row, which may be fed again."""
        first = len(self.hashes)
        if self.computed < (first + 1) * page_size:  # as mostly
            return
        end = min(self.computed, len(tokens) - 1 - self._lead) // page_size
        if first < end:
            extend_hashes(self.hashes, tokens, end, page_size, self._lead)
            for page, key in zip(self.block_table[first:end], self.hashes[first:], strict=True):
                pool.publish(page, key)

    def drop(self, pool: BlockPool) -> None:
        """Free the pages."""
        pool.release(self.block_table)
        self.block_table, self.hashes, self.computed = array("i"), [], 0
