"""Drafts with their branches, which are laid out as trees while a batch drafts the branches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.draft_tree import DraftTree
from outrider.drafting.draft_model.session import DraftState
from outrider.drafting.drafters import ForkBatch
from outrider.drafting.proposer import SessionKey


class BranchedTrees:
    """The trees of sessions, complete but for the `num_tokens` that a batch drafts per branch."""

    def __init__(self, states: Sequence[DraftState], num_tokens: int) -> None:
        self._trees: list[tuple[DraftState, tuple[int, ...]]] = []  # with the parents
        self._rows: list[int] = []  # of the branches in the batch
        tokens, told, firsts = list[int](), bytearray(), list[int]()
        for state in states:
            ahead, root = state.ahead, len(tokens)
            length = len(ahead.guess)
            parents = list(range(-1, length - 1))
            tokens += ahead.guess
            told += ahead.confidences
            for (accepted, token), branch in ahead.branches.items():
                parents.append(accepted - 1)
                if accepted == length - 1 and token == ahead.guess[-1]:
                    parents[-1] = accepted  # it makes the guess longer
                else:
                    tokens.append(token)
                    told.append(0)  # a branch's own token is none of a draft
                    parents.append(len(tokens) - root - 1)
                first = len(tokens)
                parents += range(first - root, first - root + num_tokens - 1)
                firsts.append(first)
                tokens += [0] * num_tokens
                told += bytes(num_tokens)
                self._rows.append(branch.row)
            self._trees.append((state, tuple(parents)))
        self._tokens, self._told = np.array(tokens, np.int32), np.frombuffer(told, np.uint8)
        self._drafted = np.array(firsts, np.intp)[:, None] + np.arange(num_tokens)

    def __len__(self) -> int:
        """Return the number of branches."""
        return len(self._rows)

    def push(self, batch: ForkBatch) -> list[tuple[SessionKey, DraftTree]]:
        """Return the trees with what the batch drafted, which the scorer is about to hold."""
        drafted = batch.forks.candidates[:, :, 0]
        confidences = np.frombuffer(batch.confidences, np.uint8).reshape(drafted.shape)
        self._tokens[self._drafted] = drafted[self._rows]
        self._told[self._drafted] = confidences[self._rows]
        tokens, told, end = self._tokens.tolist(), self._told.tobytes(), 0
        pushed: list[tuple[SessionKey, DraftTree]] = []
        for state, parents in self._trees:
            first, end = end, end + len(parents)
            length = len(state.follower.tokens)
            tree = DraftTree(length, tuple(tokens[first:end]), parents, (), told[first:end])
            state.follower.push(tree)
            pushed.append((state.key, tree))
        return pushed
