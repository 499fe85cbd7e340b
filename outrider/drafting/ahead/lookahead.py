"""The guesses that a session's pages hold past its text, and the branches that leave them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.drafting.ahead.branches import DraftedBranch, adopt, drop
from outrider.drafting.drafters import ForkedGuess, Forks
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.types import common_prefix_len


class Lookahead:
    """A guess, the candidates at each of its places, and branches that leave it.

    The guess's keys and values follow the committed text's in the session's pages, but for those
    of its last token if candidates are known. A branch has pages of its own.
    """

    __slots__ = ("branches", "confidences", "forks", "guess")

    def __init__(self) -> None:
        self.branches: dict[tuple[int, int], DraftedBranch] = {}
        """By the accepted tokens of the guess, and the token after these."""
        self._clear()

    def _clear(self) -> None:
        self.guess: list[int] = []
        self.forks: Forks | None = None  # [len(guess), F], or not known
        self.confidences = b""  # of the guess; empty without candidates

    def begin(self, guess: ForkedGuess) -> None:
        """Take a guess with candidates."""
        self.guess, self.confidences, self.forks = guess

    @property
    def num_fed(self) -> int:
        """Guesses in the cache."""
        return len(self.guess) - (self.forks is not None)

    def follow(self, pool: BlockPool, block_table: array[int], fresh: Sequence[int]) -> int:
        """Follow a text that went on with `fresh`; return how many of these are in the cache.

        If all are, the line goes on after them: along the branch that came true, or, where the
        line itself did, along the branch that continues it. Else nothing is left.
        """
        branches, guess, last = self.branches, self.guess, len(fresh) - 1
        if branches and fresh[:last] == guess[:last] and (last, fresh[last]) in branches:
            known = last  # as nearly always: a branch's token differs from the line's
        else:
            known = min(common_prefix_len(fresh, guess), self.num_fed)
        within = known > last
        if branches:
            self.branches = {}
            chosen = branches.pop(
                (len(guess) - 1, guess[-1]) if within else (known, fresh[known]), None
            )
            drop(pool, branches.values())
            if chosen is not None:
                adopt(pool, block_table, chosen)
                grown = chosen.batch.grown(chosen.row)
                if not within:
                    self.begin(grown)
                    rest = fresh[known + 1 :]
                    return known + 1 + (self.follow(pool, block_table, rest) if rest else 0)
                self._continue(grown)
        if within:
            self._cut(known)
        else:
            self._clear()
        return known

    def _continue(self, grown: ForkedGuess) -> None:
        """Make the guess longer by that of a branch."""
        assert self.forks is not None
        self.guess = self.guess + grown.tokens
        self.forks = Forks.joined([self.forks, grown.forks])
        self.confidences += grown.confidences

    def _cut(self, known: int) -> None:
        """Leave out the first guesses, which came true."""
        self.guess = self.guess[known:]
        if self.forks is not None:
            self.forks = self.forks[known:]
            self.confidences = self.confidences[known:]

    def drop(self, pool: BlockPool) -> None:
        """Forget all and free the pages of the branches."""
        self._clear()
        self.drop_branches(pool)

    def drop_branches(self, pool: BlockPool) -> bool:
        """Free the pages of the branches; False if there are none."""
        if not self.branches:
            return False
        drop(pool, self.branches.values())
        self.branches = {}
        return True
