"""Drafts for what may come true: one batch of branches that leave the sessions' chains.

A session's cache holds its committed text of n tokens and, after it, a chain d_1 .. d_K that the
scorer is verifying. The verdict will be: a of them accepted, then a token y. A branch (a, y) is a
guess of it, and gets a chain of its own: after the text, d_1 .. d_a and y.

A branch reads the pages of its session that it fills no further, and has its own from there on.
The page within which it leaves the chain is copied. When a verdict comes, `adopt` gives the pages
of the branch that came true to the session; `drop` frees those of all others. Until then nothing
may be fed to the session, and it must be neither closed nor evicted before its branches are
dropped: they do not hold the pages that they share.

    forks = drafter.forks(slices, sampling, num_tokens, fanout)   # K tokens after the text
    ... send forks.chains[row]; choose among forks.candidates[row] ...
    drafted = draft_branches(drafter, pool, trunks, branches, num_tokens=K, fanout=F)
    ... send them; a verdict comes: it is branch b of a session ...
    adopt(pool, block_table, b); drop(pool, others)
    # The cache now holds the text of b.length tokens and b.tokens after it; b.candidates are the
    # next branches' tokens: nothing is fed again before the next `draft_branches`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.draft_model.chains import Forks, draft_forks
from outrider.engine.batch import Model, RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Trunk:
    """A session whose cache holds `length` committed tokens and, after them, its whole chain."""

    length: int
    block_table: Sequence[int]
    sampling: SamplingParams


class Branch(NamedTuple):
    """The guess that `accepted` tokens of a trunk's chain come true, and then `token`."""

    trunk: int  # index into the trunks of the call
    accepted: int  # 0 .. K
    token: int


class DraftedBranch(NamedTuple):
    """A branch with its chain, whose keys and values are all in the cache, and its own pages."""

    branch: Branch
    length: int  # of its text: the trunk's, `accepted` and `token`
    first_page: int  # place of `pages` in the block table
    pages: array[int]  # owned, room for a token more: hand them to `adopt` or `drop`
    guess: list[int]  # its chain, and the best candidate at its end, which is not in the cache
    forks: Forks  # of the batch, in which it is
    row: int

    @property
    def candidates(self) -> NDArray[np.int32]:
        """[K + 1, F]"""
        found: NDArray[np.int32] = self.forks.candidates[self.row]
        return found

    @property
    def gaps(self) -> NDArray[np.float32]:
        """[K + 1, F]"""
        found: NDArray[np.float32] = self.forks.gaps[self.row]
        return found

    @property
    def tokens(self) -> list[int]:
        """Its chain: at positions length, length + 1, ..."""
        return self.guess[:-1]


class ForkDrafter(Protocol):
    """Drafts chains of one length with candidates at every place of them."""

    @property
    def page_size(self) -> int: ...

    def forks(
        self,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Forks:
        """Copy pages (source, target), feeds `slices`, drafts `num_tokens` after each.

        Page tables cover `num_tokens` more than the slices. Sources are read before any target is
        written. Raises what the model raises.
        """
        ...


class BranchingModel(Model, Protocol):
    """A model whose pages can be copied."""

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Make pages `target` int64 [n] hold the keys and values of `source` [n]."""
        ...


class EagerForks:
    """`ForkDrafter` with any model on any device."""

    def __init__(self, model: BranchingModel) -> None:
        self._model = model
        self.page_size = model.page_size

    def forks(
        self,
        slices: Sequence[RowSlice],
        sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
        copies: Sequence[tuple[int, int]] = (),
    ) -> Forks:
        self.copy(copies)
        return draft_forks(self._model, slices, sampling, num_tokens, fanout)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target)."""
        if copies:
            pages = torch.tensor(copies).to(self._model.device, non_blocking=True)
            self._model.copy_pages(pages[:, 0], pages[:, 1])


def draft_branches(
    drafter: ForkDrafter,
    pool: BlockPool,
    trunks: Sequence[Trunk],
    branches: Sequence[Branch],
    *,
    num_tokens: int,
    fanout: int,
) -> list[DraftedBranch]:
    """Drafts `num_tokens` after each of `branches`, all in one batch, a trunk's side by side.

    `branches` are in order of preference: when the pool has no page left, the rest is left out. The
    caller sees to it that a branch, its chain and a token more, length + accepted + 2 + num_tokens
    tokens, stay within the model's length. If the model raises, no page is kept.
    """
    page_size = drafter.page_size
    copies: list[tuple[int, int]] = []
    rows: list[tuple[Branch, RowSlice, array[int]]] = []  # with the pages that it owns
    tables = [array("i", trunk.block_table) for trunk in trunks]
    for branch in branches:
        shared = tables[branch.trunk]
        position = trunks[branch.trunk].length + branch.accepted  # of the branch's token
        first, offset = divmod(position, page_size)
        needed = -(-(position + 2 + num_tokens) // page_size) - first
        if needed > pool.num_free:
            break
        pages = array("i", [pool.allocate() for _ in range(needed)])
        if offset:
            copies.append((shared[first], pages[0]))
        rows.append((branch, RowSlice((branch.token,), position, shared[:first] + pages, 1), pages))
    if not rows:
        return []
    rows.sort(key=lambda row: row[0].trunk)  # rows side by side read once what they share
    slices = [row for _, row, _ in rows]
    sampling = [trunks[branch.trunk].sampling for branch, _, _ in rows]
    try:
        forks = drafter.forks(slices, sampling, num_tokens, fanout, copies)
    except BaseException:
        for _, _, pages in rows:
            pool.release(pages)
        raise
    guesses = forks.candidates[:, :, 0].tolist()
    return [
        DraftedBranch(branch, row.start + 1, row.start // page_size, pages, guess, forks, i)
        for i, ((branch, row, pages), guess) in enumerate(zip(rows, guesses, strict=True))
    ]


def lengthen(
    drafter: ForkDrafter, branches: Sequence[tuple[Trunk, DraftedBranch]], fanout: int
) -> Forks:
    """Feed the last token of each branch's guess, and finds what may follow it; once for each.

    Of the branch that comes true the guess is in the cache then, and its candidates go on with
    these: [branches, 1, F].
    """
    slices = []
    for trunk, branch in branches:
        table = array("i", trunk.block_table[: branch.first_page]) + branch.pages
        start = branch.length + len(branch.guess) - 1
        slices.append(RowSlice(branch.guess[-1:], start, table, 1))
    return drafter.forks(slices, [trunk.sampling for trunk, _ in branches], 0, fanout)


def adopt(pool: BlockPool, block_table: MutableSequence[int], branch: DraftedBranch) -> None:
    """The branch came true: its pages become the session's, in place of those it left behind."""
    pool.release(block_table[branch.first_page :])
    del block_table[branch.first_page :]
    block_table.extend(branch.pages)


def drop(pool: BlockPool, branches: Iterable[DraftedBranch]) -> None:
    """Frees the pages of branches that did not come true."""
    for branch in branches:
        pool.release(branch.pages)
