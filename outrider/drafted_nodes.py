"""The nodes of many drafts in flat arrays, without tokens: for code that reads all at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.draft_tree import chain_parents


class DraftNodes(NamedTuple):
    """The nodes of a draft that may be looked at before it is verified."""

    confidences: bytes = b""  # one per node, as `DraftTree` has them; empty: none are told
    parents: tuple[int, ...] = ()  # as `DraftTree` has them; empty: a chain


NO_NODES = DraftNodes()


class Forest:
    """The nodes of several drafts, one draft after the other; a chain is a tree with one path.

    A parent comes before its children. The root of all drafts has the number n of the nodes.
    """

    def __init__(self, drafts: Sequence[DraftNodes]) -> None:
        sizes = np.array([len(draft.confidences) for draft in drafts])
        self.starts = sizes.cumsum() - sizes  # [drafts]
        self.confidences = np.frombuffer(b"".join([each.confidences for each in drafts]), np.uint8)
        self.size = size = len(self.confidences)
        by_draft = [each.parents or chain_parents(len(each.confidences)) for each in drafts]
        own = np.fromiter(chain.from_iterable(by_draft), np.int64, size)
        parents = np.where(own < 0, size, own + np.repeat(self.starts, sizes))
        self.parents = parents = np.append(parents, size)  # [n + 1]: the root's own is the root
        depths, above = (parents < size).astype(np.int64), parents
        while (above < size).any():  # twice as far up each time
            depths, above = depths + depths[above], above[above]
        self.depths = depths[:size]  # [n]: ancestors of each node

    def products(self, rates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the product of `rates` [n] over each node and its ancestors.

        With rates of at most 1 no child's exceeds its parent's, by no rounding either.
        """
        found, order = np.append(rates, 1.0), self.depths.argsort(kind="stable")
        levels = np.searchsorted(self.depths[order], np.arange(1, 1 + self.depths.max(initial=0)))
        for level in np.split(order, levels):
            found[level] *= found[self.parents[level]]
        return found[: self.size]

    def verified(self, last: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which nodes [n] were accepted, and which of all were tried.

        `last` [drafts] are the last accepted nodes, counted in each draft; -1: none was. Tried are
        the children of accepted nodes and of the root: of the others nothing is known.
        """
        accepted = np.zeros(self.size + 1, np.bool_)
        nodes = np.where(last < 0, self.size, self.starts + last)
        while (nodes < self.size).any():
            accepted[nodes] = True
            nodes = self.parents[nodes]
        accepted[self.size] = True
        return accepted[:-1], accepted[self.parents[:-1]]
