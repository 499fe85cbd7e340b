"""The nodes of a draft without tokens: for code that weighs them before they are verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from outrider.draft_tree import depths


class DraftNodes(NamedTuple):
    """The nodes of a draft that may be looked at before it is verified."""

    confidences: bytes = b""  # one per node, as `DraftTree` has them; empty: none are told
    parents: tuple[int, ...] = ()  # as `DraftTree` has them; empty: a chain

    @property
    def depths(self) -> Sequence[int]:
        """Return the number of ancestors of each node."""
        return depths(self.parents) if self.parents else range(len(self.confidences))

    def products(self, rates: Iterable[float]) -> Iterable[float]:
        """Return the product of `rates`, one per node, over each node and its ancestors.

        With rates of at most 1 no child's exceeds its parent's, by no rounding either.
        """
        if not self.parents:
            return accumulate(rates, mul)
        found = [*rates, 1.0]  # the root's comes last: its number is -1
        for node, parent in enumerate(self.parents):
            found[node] *= found[parent]
        return found[:-1]

    def tried(self, last: int) -> list[tuple[int, int, bool]]:
        """Return depth and confidence of each node that was tried, and whether it was accepted.

        `last` is the last accepted node; -1: none was. Tried are the children of accepted nodes and
        of the root: of the others nothing is known.
        """
        if not self.parents:
            return [(i, told, i <= last) for i, told in enumerate(self.confidences[: last + 2])]
        path = {-1}
        while last >= 0:
            path.add(last)
            last = self.parents[last]
        nodes = zip(self.parents, self.depths, self.confidences, strict=True)
        return [
            (depth, told, node in path)
            for node, (parent, depth, told) in enumerate(nodes)
            if parent in path
        ]


NO_NODES = DraftNodes()
