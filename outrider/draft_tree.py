"""The one structure between proposer and scorer: a tree of guesses after a committed length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequestError
from outrider.params import TokenIds


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guesses for the tokens at positions base_len, base_len + 1, ...

    `parents[i]` is -1 for a child of the root, else smaller than i. Siblings are ordered by
    preference. Build one through `chain` or `validated`; the constructor checks nothing.
    """

    base_len: int
    token_ids: TokenIds
    parents: tuple[int, ...]

    @staticmethod
    def chain(base_len: int, token_ids: Sequence[int]) -> DraftTree:
        """A tree with one path."""
        return DraftTree(base_len, tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))

    @staticmethod
    def branched(
        base_len: int, chain: Sequence[int], branches: Iterable[tuple[int, Sequence[int]]]
    ) -> DraftTree:
        """`chain`, preferred, with side branches: (a, tokens) goes on after its first `a` tokens.

        After all of the chain (a = len(chain)) the first branch makes the chain longer.
        """
        tokens = list(chain)
        parents = list(range(-1, len(chain) - 1))
        for accepted, branch in branches:
            if branch:
                first = len(tokens)
                parents.append(accepted - 1)
                parents.extend(range(first, first + len(branch) - 1))
                tokens.extend(branch)
        return DraftTree(base_len, tuple(tokens), tuple(parents))

    @staticmethod
    def validated(
        base_len: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        *,
        vocab_size: int,
        max_nodes: int,
    ) -> DraftTree:
        """A tree from untrusted parts; empty `parents` means a chain.

        Raises `InvalidRequestError` for too many nodes, a token outside the vocabulary, or a
        parent that does not come before its child.
        """
        if len(token_ids) > max_nodes:
            raise InvalidRequestError(f"a block holds at most {max_nodes} nodes", param="token_ids")
        if any(not 0 <= token < vocab_size for token in token_ids):
            raise InvalidRequestError(f"token ids must be below {vocab_size}", param="token_ids")
        if not parents:
            return DraftTree.chain(base_len, token_ids)
        if len(parents) != len(token_ids):
            raise InvalidRequestError("one parent per token, or none at all", param="parents")
        if any(not -1 <= parent < i for i, parent in enumerate(parents)):
            raise InvalidRequestError("a parent comes before its child", param="parents")
        return DraftTree(base_len, tuple(token_ids), tuple(parents))

    def walk(self, committed: Sequence[int]) -> DraftTree | None:
        """What is left of the tree below `committed`, the tokens at base_len, base_len + 1, ...

        Returns None when the path falls off the tree (a miss); an empty tree when it ends on a
        leaf. The result is rooted at base_len + len(committed).
        """
        node = self.descend(committed)
        if node is None:
            return None
        return self if node == -1 else self._below(node, self.base_len + len(committed))

    def descend(self, tokens: Sequence[int], node: int = -1) -> int | None:
        """The node that `tokens` lead to, starting below `node`; None if they fall off the tree."""
        try:
            for token in tokens:
                child = self.parents.index(node, node + 1)
                while self.token_ids[child] != token:
                    child = self.parents.index(node, child + 1)
                node = child
        except ValueError:
            return None
        return node

    def is_leaf(self, node: int) -> bool:
        """Whether nothing follows `node`; -1 is the root."""
        return node not in self.parents

    @property
    def is_chain(self) -> bool:
        """One path, in order."""
        return self.parents == tuple(range(-1, len(self.token_ids) - 1))

    def at_most(self, max_nodes: int) -> DraftTree:
        """Its first nodes, which are a tree too: a parent comes before its child."""
        if len(self.token_ids) <= max_nodes:
            return self
        return DraftTree(self.base_len, self.token_ids[:max_nodes], self.parents[:max_nodes])

    def first_path(self, max_len: int, node: int = -1) -> TokenIds:
        """The preferred path below `node`: always the first child, `max_len` tokens at most."""
        path: list[int] = []
        try:
            while len(path) < max_len:
                node = self.parents.index(node, node + 1)
                path.append(self.token_ids[node])
        except ValueError:
            pass  # a leaf
        return tuple(path)

    def _below(self, root: int, base_len: int) -> DraftTree:
        renumbered = {root: -1}
        tokens: list[int] = []
        parents: list[int] = []
        for i in range(root + 1, len(self.token_ids)):
            parent = renumbered.get(self.parents[i])
            if parent is not None:
                renumbered[i] = len(tokens)
                tokens.append(self.token_ids[i])
                parents.append(parent)
        return DraftTree(base_len, tuple(tokens), tuple(parents))
