"""The guesses that a session's pages hold past its text, and the branches that leave them."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from outrider.drafting.ahead.branches import DraftedBranch, adopt, drop
from outrider.drafting.drafters import Forks
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.types import common_prefix_len


class Lookahead:
    """A line of guesses, the candidates at each of its places, and branches that leave it.

    The line's keys and values follow the committed text's in the session's pages. A branch has
    pages of its own. The best candidate at the line's end is guessed, too, and is not in the cache.
    """

    __slots__ = ("branches", "confidences", "forks", "line")

    def __init__(self) -> None:
        self.branches: list[DraftedBranch] = []
        self._clear()

    def _clear(self) -> None:
        self.line: list[int] = []
        self.forks: Forks | None = None  # [len(line) + 1, F], or not known
        self.confidences = b""  # of the guess; empty without candidates

    @property
    def guess(self) -> list[int]:
        """The line, and the token at its end if candidates are known."""
        if self.forks is None:
            return self.line
        return [*self.line, int(self.forks.candidates[-1, 0])]

    def draft(self, num_tokens: int) -> tuple[list[int], bytes]:
        """Return the guess's first tokens and their confidences, empty if these are not known."""
        return self.guess[:num_tokens], self.confidences[:num_tokens]

    @property
    def end(self) -> tuple[int, int]:
        """Place and token by which the branch that goes on after the guess leaves the line."""
        return len(self.line), self.guess[-1]

    def follow(
        self, pool: BlockPool, block_table: MutableSequence[int], fresh: Sequence[int]
    ) -> int:
        """Follow a text that went on with `fresh`; return how many of these are in the cache.

        If all are, the line goes on after them: along the branch that came true, or, where the
        line itself did, along the branch that continues it. Else nothing is left.
        """
        if self.branches:
            self._take_branch(pool, block_table, fresh)
        known = common_prefix_len(fresh, self.line)
        if known < len(fresh):
            self._clear()
            return known
        self.line = self.line[known:]
        if self.forks is not None:
            self.forks = self.forks[known:]
            self.confidences = self.confidences[known:]
        return known

    def _take_branch(
        self, pool: BlockPool, block_table: MutableSequence[int], fresh: Sequence[int]
    ) -> None:
        """Make the branch that `fresh` takes part of the line, and drop the others."""
        on_line = common_prefix_len(fresh, self.line)
        taken = (on_line, fresh[on_line]) if on_line < len(fresh) else self.end
        branches, self.branches = self.branches, []
        i = next((i for i, b in enumerate(branches) if b.branch[1:] == taken), None)
        if i is not None:
            assert self.forks is not None
            chosen = branches.pop(i)
            adopt(pool, block_table, chosen)
            place, (beyond, confidence) = chosen.branch.accepted, chosen.beyond
            self.line = [*self.line[:place], chosen.branch.token, *chosen.guess]
            self.forks = Forks.joined([self.forks[: place + 1], chosen.forks, beyond])
            self.confidences = self.confidences[: place + 1] + chosen.confidences + confidence
        drop(pool, branches)

    def drop(self, pool: BlockPool) -> None:
        """Forget all and free the pages of the branches."""
        self._clear()
        self.drop_branches(pool)

    def drop_branches(self, pool: BlockPool) -> bool:
        """Free the pages of the branches; False if there are none."""
        if not self.branches:
            return False
        drop(pool, self.branches)
        self.branches = []
        return True
