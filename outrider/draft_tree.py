"""The one structure between proposer and scorer: a tree of guesses after a committed length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequestError
from outrider.types import TokenIds


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
        node = -1
        for token in committed:
            node = self._child(node, token)
            if node < 0:
                return None
        return self if node == -1 else self._below(node, self.base_len + len(committed))

    def first_path(self, max_len: int) -> TokenIds:
        """The preferred path from the root: always the first child, `max_len` tokens at most."""
        path: list[int] = []
        node = -1
        for i, parent in enumerate(self.parents):
            if len(path) == max_len:
                break
            if parent == node:
                path.append(self.token_ids[i])
                node = i
        return tuple(path)

    def _child(self, node: int, token: int) -> int:
        for i in range(node + 1, len(self.token_ids)):
            if self.parents[i] == node and self.token_ids[i] == token:
                return i
        return -1

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
