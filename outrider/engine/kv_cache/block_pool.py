"""The pages of the KV cache: reference counts, and the cache of known prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

PageHash = bytes

ROOT_HASH: PageHash = b""


def page_hash(parent: PageHash, token_ids: Sequence[int]) -> PageHash:
    """Hash the tokens of a full page and, through `parent`, all tokens before it."""
    return hashlib.blake2b(array("q", token_ids), digest_size=16, key=parent).digest()


def extend_hashes(
    hashes: list[PageHash], token_ids: Sequence[int], num_pages: int, page_size: int, lead: int = 0
) -> None:
    """Append the missing hashes of the first `num_pages` pages of a text.

    Row p of a page depends on the tokens up to p + `lead`.
    """
    parent = hashes[-1] if hashes else ROOT_HASH
    if lead and not hashes:
        parent = page_hash(ROOT_HASH, token_ids[:lead])
    for i in range(len(hashes), num_pages):
        start = i * page_size + lead
        parent = page_hash(parent, token_ids[start : start + page_size])
        hashes.append(parent)


class BlockPool:
    """Reference-counted pages with prefix sharing.

    A page is either used (referenced by sequences) or free. A free page may still be *cached*. It
    then keeps its hash and contents until it is the least recently used one and a page is needed.
    Published pages are immutable, because sequences share only full pages and write behind them.
    """

    def __init__(self, num_pages: int, *, enable_prefix_caching: bool = True) -> None:
        self._caching = enable_prefix_caching
        self._refs = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))  # free, nothing worth keeping
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, oldest first
        self._hash_of: dict[int, PageHash] = {}
        self._page_of: dict[PageHash, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return, cached ones included."""
        return len(self._blank) + len(self._cached)

    def allocate(self) -> int:
        """Return a page with one reference and undefined contents. Check `num_free` first."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
        self._refs[page] = 1
        return page

    def take(self, count: int) -> list[int]:
        """Allocate so many pages."""
        blank = self._blank
        first = len(blank) - count
        if first < 0:
            return [self.allocate() for _ in range(count)]
        pages = blank[first:]
        del blank[first:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def match(self, hashes: Iterable[PageHash]) -> list[int]:
        """Return the cached pages of the longest known prefix, without a reference."""
        pages: list[int] = []
        for key in hashes:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_unused(self, pages: Iterable[int]) -> int:
        """Count the free ones of `pages`; sharing them lowers `num_free`."""
        return sum(self._refs[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Take a reference to each of `pages`, which `match` returned."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1

    def publish(self, page: int, key: PageHash) -> None:
        """Let `match` find a full page, once the forward that wrote it was committed.

        A page whose contents another page has already stays private.
        """
        if self._caching and key not in self._page_of and page not in self._hash_of:
            self._page_of[key] = page
            self._hash_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page of a block table, the last page first.

        So a prefix stays cached longer than its continuations.
        """
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._blank.append(page)

    def discard(self, pages: Sequence[int]) -> None:
        """Free pages of one reference that were never published."""
        refs = self._refs
        for page in pages:
            refs[page] = 0
        self._blank += pages

    def check_invariants(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the counts agree with the sequences' block tables."""
        uses, free = [0] * len(self._refs), {*self._blank, *self._cached}
        for table in block_tables:
            for page in table:
                uses[page] += 1
        assert self._refs == uses, "references that no block table explains"
        assert len(free) == self.num_free == uses.count(0), "a page is free twice, or lost"
        assert not any(map(uses.__getitem__, free)), "a free page is used"
        assert self._page_of == {key: page for page, key in self._hash_of.items()}
        assert self._cached.keys() <= self._hash_of.keys()
        assert self._hash_of.keys().isdisjoint(self._blank)
