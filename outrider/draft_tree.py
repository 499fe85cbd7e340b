"""The structure between proposer and scorer: a tree of guesses after a committed length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from outrider.errors import InvalidRequestError
from outrider.params import TokenIds

MAX_DRAFT_PROBS: Final = 256
"""Tokens of one node's distribution at most."""
_LONG: Final = 8  # tokens, from which the whole of a chain is compared at once
_SUM_TOLERANCE: Final = 1e-3  # float32, summed in any order


class DraftProbs(NamedTuple):
    """The sparse distribution that a node's token was drawn from; the probabilities sum to 1."""

    token_ids: TokenIds
    probs: tuple[float, ...]


class DraftTree(NamedTuple):  # made for each row and round, in a third of a dataclass's time
    """Guesses for the tokens at positions base_len, base_len + 1, ...

    `parents[i]` is -1 for a child of the root, else smaller than i. Siblings are ordered by
    preference. Build one through `chain` or `validated`; the constructor checks nothing.
    """

    base_len: int
    token_ids: TokenIds
    parents: tuple[int, ...]
    probs: tuple[DraftProbs | None, ...] = ()
    """The distribution of each node's token. None, or no entries at all: a point mass."""
    confidences: bytes = b""
    """How sure the proposer is of each node, given those before it, as draft.proto defines it.
    Empty: it does not say."""

    @staticmethod
    def chain(
        base_len: int,
        token_ids: Sequence[int],
        probs: Sequence[DraftProbs | None] = (),
        confidences: bytes = b"",
    ) -> DraftTree:
        """Build a tree with one path."""
        parents = chain_parents(len(token_ids))
        return DraftTree(base_len, tuple(token_ids), parents, tuple(probs), confidences)

    @staticmethod
    def branched(
        base_len: int,
        chain: Sequence[int],
        branches: Iterable[tuple[int, Sequence[int]]],
        confidences: bytes = b"",
    ) -> DraftTree:
        """Build `chain`, preferred, with branches: (a, tokens) goes on after its first `a` tokens.

        After all of the chain (a = len(chain)) the first branch makes the chain longer. The
        `confidences` are those of the chain, then of the branches.
        """
        tokens = list(chain)
        parents = list(range(-1, len(chain) - 1))
        for accepted, branch in branches:
            if branch:
                first = len(tokens)
                tokens += branch
                parents.append(accepted - 1)
                parents += range(first, len(tokens) - 1)
        return DraftTree(base_len, tuple(tokens), tuple(parents), (), confidences)

    @staticmethod
    def validated(
        base_len: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        vocab_size: int,
        max_nodes: int,
        probs: Sequence[DraftProbs] = (),
        confidences: bytes = b"",
    ) -> DraftTree:
        """Check untrusted parts; empty `parents` mean a chain, empty `probs` point masses.

        An entry of `probs` without tokens is a point mass, too. `token_ids` must not be negative.
        Raises `InvalidRequestError` for too many nodes, a token outside the vocabulary, a parent
        that does not come before its child, or `probs` that cannot have drawn the node's token.
        """
        num_nodes = len(token_ids)
        if num_nodes > max_nodes:
            raise InvalidRequestError(f"a block holds at most {max_nodes} nodes", param="token_ids")
        if confidences and len(confidences) != num_nodes:
            raise InvalidRequestError("one confidence per token, or none", param="confidences")
        token_ids = tuple(token_ids[:])  # a slice of a message's field is faster than its items
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequestError(f"token ids must be below {vocab_size}", param="token_ids")
        drawn_from: tuple[DraftProbs | None, ...] = ()
        if probs:
            if len(probs) != num_nodes:
                raise InvalidRequestError(
                    "one distribution per token, or none", param="draft_probs"
                )
            drawn_from = tuple(
                [
                    _checked(each, token, vocab_size) if each.token_ids or each.probs else None
                    for each, token in zip(probs, token_ids, strict=True)
                ]
            )
        if not parents:
            above = chain_parents(num_nodes)
        elif len(parents) != num_nodes:
            raise InvalidRequestError("one parent per token, or none at all", param="parents")
        else:
            above = _checked_parents(tuple(parents[:]))
        # The constructor would take three times as long.
        return tuple.__new__(DraftTree, (base_len, token_ids, above, drawn_from, confidences))

    def walk(self, committed: Sequence[int]) -> DraftTree | None:
        """Return the rest of the tree below `committed`, the tokens from base_len on.

        None if the path falls off the tree (a miss); an empty tree if it ends on a leaf.
        """
        if self.is_chain:
            n = len(committed)
            if self.token_ids[:n] != tuple(committed):
                return None
            return DraftTree.chain(
                self.base_len + n, self.token_ids[n:], self.probs[n:], self.confidences[n:]
            )
        node = self.descend(committed)
        if node is None:
            return None
        size = len(self.token_ids)
        return self.below(node, size, size)._replace(base_len=self.base_len + len(committed))

    def descend(self, tokens: Sequence[int], node: int = -1) -> int | None:
        """Return the node that `tokens` lead to from `node`; None if they fall off the tree."""
        token_ids, parents, num_nodes = self.token_ids, self.parents, len(self.parents)
        if len(tokens) > _LONG and self.is_chain:
            end = node + 1 + len(tokens)
            return end - 1 if token_ids[node + 1 : end] == tuple(tokens) else None
        for token in tokens:
            child = node + 1  # the first one, as a rule
            while child == num_nodes or token_ids[child] != token or parents[child] != node:
                if node not in parents[child + 1 :]:
                    return None
                child = parents.index(node, child + 1)
            node = child
        return node

    def outcomes(self, num_verified: int, node: int = -1) -> list[tuple[int, int]]:
        """Return how a step may end that verifies so many nodes of the preferred path.

        Per outcome that the tree knows how many tokens it emits, and the node of the last one.
        """
        path = [node, *self._first_nodes(num_verified, node)]
        emitted = {node: number for number, node in enumerate(path, start=1)}
        after = self.parents[node + 1 :]
        return [
            (emitted[parent], child)
            for child, parent in enumerate(after, start=node + 1)
            if parent in emitted and child not in emitted
        ]

    def is_outrun(self, tokens: Sequence[int]) -> bool:
        """Tell whether `tokens` pass a leaf: all that the tree says of them was true."""
        node = -1
        for token in tokens:
            if self.is_leaf(node):
                return True
            if (child := self.descend((token,), node)) is None:
                return False
            node = child
        return False

    def is_leaf(self, node: int) -> bool:
        """Tell whether nothing follows `node`; -1 is the root."""
        parents, following = self.parents, node + 1
        if following < len(parents) and parents[following] == node:  # as most are
            return False
        return node not in parents[following:]

    @property
    def is_chain(self) -> bool:
        """Tell whether the tree is one path, in order."""
        return self.parents == chain_parents(len(self.parents))

    def at_most(self, max_nodes: int) -> DraftTree:
        """Return the first nodes, which are a tree: a parent comes before its child."""
        n = max_nodes
        told = self.confidences[:n]
        return DraftTree(self.base_len, self.token_ids[:n], self.parents[:n], self.probs[:n], told)

    def below(self, node: int, max_nodes: int, max_depth: int) -> DraftTree:
        """Return the first nodes below `node` (-1: the root), `max_depth` deep at most."""
        depth = {node: 0}
        kept: list[int] = []
        for i in range(node + 1, len(self.parents)):
            above = depth.get(self.parents[i], max_depth)
            if above < max_depth and len(kept) < max_nodes:
                depth[i] = above + 1
                kept.append(i)
        place = {node: -1} | {i: n for n, i in enumerate(kept)}
        return DraftTree(
            self.base_len,
            tuple([self.token_ids[i] for i in kept]),
            tuple([place[self.parents[i]] for i in kept]),
            tuple([self.probs[i] for i in kept]) if self.probs else (),
            bytes([self.confidences[i] for i in kept]) if self.confidences else b"",
        )

    def first_path(self, max_len: int, node: int = -1) -> TokenIds:
        """Return at most `max_len` tokens of the preferred path: always the first child."""
        parents, first = self.parents, node + 1
        if max_len > _LONG and self.is_chain:
            return self.token_ids[first : first + max_len]
        end, stop = first, min(first + max_len, len(parents))
        while end < stop and parents[end] == end - 1:  # one after another, as most are
            end += 1
        path = self.token_ids[first:end]
        if len(path) < max_len and end - 1 in parents[end:]:
            further = self._first_nodes(max_len - len(path), end - 1)
            path += tuple([self.token_ids[i] for i in further])
        return path

    def first_probs(self, max_len: int, node: int = -1) -> tuple[DraftProbs | None, ...]:
        """Return the distributions of `first_path`; empty if all are point masses."""
        if not self.probs:
            return ()
        return tuple([self.probs[i] for i in self._first_nodes(max_len, node)])

    def first_confidences(self, max_len: int, node: int = -1) -> bytes:
        """Return the confidences of `first_path`; empty if the proposer told none."""
        if not self.confidences:
            return b""
        if self.is_chain:
            return self.confidences[node + 1 : node + 1 + max_len]
        return bytes([self.confidences[i] for i in self._first_nodes(max_len, node)])

    def _first_nodes(self, max_len: int, node: int) -> list[int]:
        parents, num_nodes, path = self.parents, len(self.parents), list[int]()
        while len(path) < max_len:
            child = node + 1  # the first one, as a rule
            if child == num_nodes or parents[child] != node:
                if node not in parents[child:]:
                    break  # a leaf
                child = parents.index(node, child)
            path.append(child)
            node = child
        return path


@lru_cache(maxsize=512)
def chain_parents(num_nodes: int) -> tuple[int, ...]:
    """Return the parents of a tree with one path."""
    return tuple(range(-1, num_nodes - 1))


def depths(parents: Sequence[int]) -> list[int]:
    """Return per node the number of its ancestors; a child of the root (-1) has none."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


@lru_cache(maxsize=1024)
def _checked_parents(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return `parents` if each comes before its child; raises `InvalidRequestError`.

    Most blocks have the shape of an earlier one.
    """
    if any(not -1 <= parent < i for i, parent in enumerate(parents)):
        raise InvalidRequestError("a parent comes before its child", param="parents")
    return parents


def _checked(drawn_from: DraftProbs, token: int, vocab_size: int) -> DraftProbs:
    """Return `drawn_from` if it can draw `token`; raises `InvalidRequestError`."""
    ids, probs = drawn_from
    if not 0 < len(ids) == len(probs) <= MAX_DRAFT_PROBS:
        what = f"one probability per token, and at most {MAX_DRAFT_PROBS} of them"
    elif min(ids) < 0 or max(ids) >= vocab_size or len(set(ids)) < len(ids):
        what = f"different token ids below {vocab_size}"
    elif not (min(probs) >= 0.0 and abs(sum(probs) - 1.0) <= _SUM_TOLERANCE):
        what = "probabilities that sum to 1"
    elif token not in ids or probs[ids.index(token)] == 0.0:
        what = "a probability above 0 for the node's own token"
    else:
        return drawn_from
    raise InvalidRequestError(f"draft_probs must hold {what}", param="draft_probs")
