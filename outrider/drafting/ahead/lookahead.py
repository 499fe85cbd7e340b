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
        count, branches, guess = len(fresh), self.branches, self.guess
        last = count - 1
        if branches and fresh[:last] == guess[:last]:
            chosen = branches.pop((last, fresh[last]), None)
            if chosen is not None:  # as nearly always: a branch's token differs from the line's
                self.branches = {}
                drop(pool, branches.values())
                adopt(pool, block_table, chosen)
                self.begin(chosen.batch.grown(chosen.row))
                return count
        num_fed = self.num_fed
        known = min(common_prefix_len(fresh, guess), num_fed)
        if branches:
            token = fresh[known] if known < count else guess[-1]
            chosen = branches.pop((known if known < count else num_fed, token), None)
            self.branches = {}
            drop(pool, branches.values())
            if chosen is not None:
                return self._take(pool, block_table, fresh, chosen)
        if known < count:
            self._clear()
        else:
            self._cut(known)
        return known

    def _take(
        self, pool: BlockPool, block_table: array[int], fresh: Sequence[int], chosen: DraftedBranch
    ) -> int:
        """Follow the branch that `fresh` takes, as `follow` does."""
        adopt(pool, block_table, chosen)
        place, grown = chosen.branch.accepted + 1, chosen.batch.grown(chosen.row)
        assert self.forks is not None
        self.guess = [*self.guess[: place - 1], chosen.branch.token, *grown.tokens]
        self.forks = Forks.joined([self.forks[:place], grown.forks])
        self.confidences = self.confidences[:place] + grown.confidences
        return self.follow(pool, block_table, fresh)

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
