"""Pages of the KV cache: who uses them, and which of them hold a known prefix."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

PageHash = bytes

ROOT_HASH: PageHash = b""


def page_hash(parent: PageHash, token_ids: Sequence[int]) -> PageHash:
    """The key of a full page: its tokens and, through `parent`, every token before it."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def extend_hashes(
    hashes: list[PageHash],
    token_ids: Sequence[int],
    num_pages: int,
    page_size: int,
    lead: int = 0,
) -> None:
    """Append what is missing of the keys of the first `num_pages` pages of a text, whose row p is
    a function of the tokens up to p + `lead`.
    """
    root = page_hash(ROOT_HASH, token_ids[:lead]) if lead else ROOT_HASH
    for i in range(len(hashes), num_pages):
        start = i * page_size + lead
        page = token_ids[start : start + page_size]
        hashes.append(page_hash(hashes[-1] if hashes else root, page))


class BlockPool:
    """Reference-counted pages with prefix sharing.

    A page is either used (referenced by sequences) or free. A free page may still be *cached*:
    it keeps its hash and contents until it is needed, least recently used first. Pages are
    immutable once published: sequences share only full pages and write behind them.
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
        """Pages that `allocate` can hand out, cached ones included."""
        return len(self._blank) + len(self._cached)

    def allocate(self) -> int:
        """A page with one reference and undefined contents. Check `num_free` first."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
        self._refs[page] = 1
        return page

    def match(self, hashes: Iterable[PageHash]) -> list[int]:
        """The cached pages of the longest known prefix; takes no reference."""
        pages: list[int] = []
        for key in hashes:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_unused(self, pages: Iterable[int]) -> int:
        """How many of `pages` are free: sharing them takes them out of `num_free`."""
        return sum(self._refs[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Take a reference to each of `pages`, which `match` returned."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1

    def publish(self, page: int, key: PageHash) -> None:
        """Make a full page findable. Only after the forward that wrote it was committed.

        If another page has the same contents already, this one stays private.
        """
        if self._caching and key not in self._page_of and page not in self._hash_of:
            self._page_of[key] = page
            self._hash_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page of a block table.

        From the last page to the first, so that a prefix outlives its continuations.
        """
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._blank.append(page)

    def check_invariants(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the books agree with the sequences' block tables."""
        references = Counter(page for table in block_tables for page in table)
        free = self._blank + list(self._cached)
        assert len(free) == len(set(free)), "a page is free twice"
        for page, refs in enumerate(self._refs):
            assert refs == references[page], f"page {page}: {refs} refs, {references[page]} uses"
        assert {p for p, refs in enumerate(self._refs) if refs == 0} == set(free)
        assert self._page_of == {key: page for page, key in self._hash_of.items()}
        assert all(page in self._hash_of for page in self._cached)
        assert not any(page in self._hash_of for page in self._blank)
