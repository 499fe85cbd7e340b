"""Draft one batch of branches that leave the sessions' chains.

A session's cache holds its committed text of n tokens and, after it, a chain d_1 .. d_K that the
scorer is verifying. The outcome will be that a of them are accepted, then a token y. A branch
(a, y) is a guess of it, and gets a chain of its own after the text, d_1 .. d_a and y.

A branch reads the pages of its session that it fills no further, and has its own from there on.
The page within which it leaves the chain is copied. When the outcome is known, `adopt` gives the
pages of the branch that came true to the session, and `drop` frees those of all others. Until then
nothing may be fed to the session, and it must be neither closed nor evicted before its branches are
dropped: they do not hold the pages that they share.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outrider.drafting.drafters import FedRows, ForkBatch, ForkDrafter
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.params import SamplingParams

NUM_RANKS = 8  # candidates at each place, the draft's own included


class Trunk(NamedTuple):
    """A session whose cache holds `length` committed tokens and, after them, its whole chain."""

    length: int
    block_table: array[int]
    sampling: SamplingParams


class Branch(NamedTuple):
    """The guess that `accepted` tokens of a trunk's chain come true, and then `token`."""

    trunk: int  # index into the trunks of the call
    accepted: int  # 0 .. K
    token: int


class DraftedBranch(NamedTuple):
    """A branch with its own pages, and its chain in a batch that may be in progress."""

    branch: Branch
    first_page: int  # place of `pages` in the block table
    pages: array[int]  # owned, with room for a token more: hand them to `adopt` or `drop`
    batch: ForkBatch  # whose guesses are in the cache when it has grown
    row: int  # its number there


def draft_branches(
    drafter: ForkDrafter,
    pool: BlockPool,
    trunks: Sequence[Trunk],
    branches: Sequence[Branch],
    joined: Sequence[tuple[RowSlice, SamplingParams]] = (),
    *,
    num_tokens: int,
    fanout: int,
) -> tuple[list[DraftedBranch], ForkBatch | None]:
    """Draft `num_tokens` after `joined` rows and each of `branches`, all in one batch.

    `branches` are in order of preference: when the pool has no page left, the rest is left out. A
    branch, its chain and a token more, length + accepted + 2 + num_tokens tokens, must stay within
    the model's length. If the model raises, no page is kept. Returns the batch of all rows, too,
    which begins with `joined`; None if there are none.
    """
    page_size, num_free = drafter.page_size, pool.num_free
    copies: list[tuple[int, int]] = []
    rows: list[tuple[Branch, int, array[int]]] = []  # with its pages and the place of their first
    for branch in branches:
        length, shared, _ = trunks[branch.trunk]
        position = length + branch.accepted  # of the branch's token
        first = position // page_size
        needed = -(-(position + 2 + num_tokens) // page_size) - first
        num_free -= needed
        if num_free < 0:
            break
        pages = array("i", pool.take(needed))
        if position % page_size:
            copies.append((shared[first], pages[0]))
        rows.append((branch, first, pages))
    if not rows and not joined:
        return [], None
    rows.sort(key=lambda row: row[0].trunk)  # rows side by side read once what they share
    slices = [row for row, _ in joined]
    sampling = [params for _, params in joined]
    for (trunk, accepted, token), first, pages in rows:
        length, shared, params = trunks[trunk]
        slices.append(RowSlice((token,), length + accepted, shared[:first] + pages, 1))
        sampling.append(params)
    fed = FedRows(slices, sampling)
    try:
        batch = drafter.forks(fed, num_tokens, fanout, copies, beyond=bool(rows))
    except BaseException:
        for _, _, pages in rows:
            pool.release(pages)
        raise
    return [
        DraftedBranch(branch, first, pages, batch, i)
        for i, (branch, first, pages) in enumerate(rows, start=len(joined))
    ], batch


def adopt(pool: BlockPool, block_table: array[int], branch: DraftedBranch) -> None:
    """Replace the session's pages from the branch on by those of the branch, which came true."""
    first = branch.first_page
    pool.discard(block_table[first:])  # they are past the text: not published, and not shared
    block_table[first:] = branch.pages


def drop(pool: BlockPool, branches: Iterable[DraftedBranch]) -> None:
    """Free the pages of branches that did not come true."""
    for branch in branches:
        pool.discard(branch.pages)
