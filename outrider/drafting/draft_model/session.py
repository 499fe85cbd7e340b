"""What a draft model knows and its cache holds of one session: its text, and guesses past it."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.draft_tree import DraftTree
from outrider.drafting.ahead.branches import DraftedBranch, Trunk, adopt, drop
from outrider.drafting.ahead.outcomes import Outcomes
from outrider.drafting.draft_model.chains import Forks, ReadyRow
from outrider.drafting.draft_model.masks import DraftMask
from outrider.drafting.proposer import Follower, SessionKey
from outrider.drafting.session_pages import PageCache
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.params import TokenIds
from outrider.types import common_prefix_len


class Lookahead:
    """A line of guesses, what else may come at each place of it, and branches that leave it.

    The line's keys and values follow the committed text's in the session's pages; a branch has
    pages of its own (drafting/branches.py). The best candidate at the line's end is guessed too,
    and is not in the cache.
    """

    __slots__ = ("beyond", "branches", "candidates", "gaps", "line")

    def __init__(self) -> None:
        self.line: list[int] = []
        self.candidates: NDArray[np.int32] | None = None  # [len(line) + 1, F]; None: not known
        self.gaps: NDArray[np.float32] | None = None  # the same, as in `Forks`
        self.branches: list[DraftedBranch] = []
        self.beyond: Forks | None = None  # what may follow the branches' guesses, once it is known

    @property
    def guess(self) -> list[int]:
        """The line, and the token at its end if candidates are known."""
        if self.candidates is None:
            return self.line
        return [*self.line, int(self.candidates[-1, 0])]

    def follow(
        self, pool: BlockPool, block_table: MutableSequence[int], fresh: Sequence[int]
    ) -> int:
        """The text went on with `fresh`; returns how many of these are in the cache.

        If all are, the line goes on after them: along the branch that came true, or, where the
        line itself did, along the branch that continues it. Else nothing is left.
        """
        if self.branches:
            self._take_branch(pool, block_table, fresh)
        known = common_prefix_len(fresh, self.line)
        if known == len(fresh):
            self.line = self.line[known:]
            if self.candidates is not None and self.gaps is not None:
                self.candidates, self.gaps = self.candidates[known:], self.gaps[known:]
        else:
            self.line, self.candidates, self.gaps = [], None, None
        return known

    def _take_branch(
        self, pool: BlockPool, block_table: MutableSequence[int], fresh: Sequence[int]
    ) -> None:
        """Make the branch that `fresh` takes part of the line; the others are dropped."""
        on_line = common_prefix_len(fresh, self.line)
        taken = (on_line, fresh[on_line]) if on_line < len(fresh) else self.end
        branches, beyond = self.branches, self.beyond
        self.branches, self.beyond = [], None
        i = next((i for i, b in enumerate(branches) if b.branch[1:] == taken), None)
        if i is not None:
            assert self.candidates is not None
            assert self.gaps is not None
            chosen = branches.pop(i)
            adopt(pool, block_table, chosen)
            place, chain = chosen.branch.accepted, chosen.tokens
            candidates = [self.candidates[: place + 1], chosen.candidates]
            gaps = [self.gaps[: place + 1], chosen.gaps]
            if beyond is not None:
                chain = chosen.guess
                candidates.append(beyond.candidates[i])
                gaps.append(beyond.gaps[i])
            self.line = [*self.line[:place], chosen.branch.token, *chain]
            self.candidates, self.gaps = np.concatenate(candidates), np.concatenate(gaps)
        drop(pool, branches)

    @property
    def end(self) -> tuple[int, int]:
        """Where the branch leaves the line that goes on with the guess: place and token."""
        return len(self.line), self.guess[-1]

    def drop(self, pool: BlockPool) -> None:
        """Forgets all; the pages of the branches are free."""
        self.line, self.candidates, self.gaps = [], None, None
        self.drop_branches(pool)

    def drop_branches(self, pool: BlockPool) -> bool:
        """Frees the pages of the branches; False if there are none."""
        if not self.branches:
            return False
        drop(pool, self.branches)
        self.branches, self.beyond = [], None
        return True


class DraftState(PageCache):
    """A session's tokens and what the cache holds of them, and past them."""

    __slots__ = ("ahead", "follower", "hit", "key", "mask", "patient", "samples")

    def __init__(
        self,
        key: SessionKey,
        follower: Follower,
        mask: DraftMask | None,
        *,
        samples: bool,
        once: bool,
    ) -> None:
        super().__init__()
        self.key = key
        self.follower = follower
        self.mask = mask  # of what its constraint forbids
        self.samples = samples  # as `SessionStart` says
        self.patient = not once  # its first draft may be left out, until there was one
        self.ahead = Lookahead()  # what follows the computed tokens in the pages
        self.hit = False  # the draft that is verified was at hand when it was wanted

    @property
    def at_hand(self) -> bool:
        """The scorer holds the next draft already, and so does the cache."""
        if self.follower.pushed is None:
            return False
        path = self.follower.at_hand if self.ahead.candidates is None else self.held
        return bool(path) and tuple(self.ahead.guess[: len(path)]) == path

    @property
    def held(self) -> TokenIds:
        """What the scorer verifies of what was pushed: it takes a short draft rather than none."""
        pushed, wanted = self.follower.pushed, self.follower.wanted
        return pushed.first_path(wanted) if pushed is not None and wanted else ()

    def follow(self, pool: BlockPool, fresh: Sequence[int], outcomes: Outcomes) -> None:
        """The text went on with `fresh`: what of it was guessed is computed already."""
        if self.computed != len(self.follower.tokens) - len(fresh):
            return  # the prompt is not through, or nothing was drafted since the last commit
        ahead = self.ahead
        if ahead.candidates is not None and ahead.gaps is not None:
            outcomes.observe(ahead.candidates, ahead.gaps, fresh, hit=self.hit)
        self.computed += ahead.follow(pool, self.block_table, fresh)

    def settle(self, pool: BlockPool) -> int:
        """Give up what was guessed; returns how many committed tokens are to be fed.

        At least one: the last token's logits are what the draft begins with.
        """
        self.ahead.drop(pool)
        length = len(self.follower.tokens)
        self.computed = min(self.computed, length - 1)
        return length - self.computed

    def can_branch(self, room: int) -> bool:
        """Whether outcomes of the draft's verification can be drafted for, and are of use.

        `room` is the longest text that a branch may begin with.
        """
        follower, ahead = self.follower, self.ahead
        wanted, length = follower.wanted, len(follower.tokens)
        return (
            wanted > 0
            and ahead.candidates is not None
            and not ahead.branches
            and self.computed == length
            and length + len(ahead.line) + 1 < room
            and follower.max_len - length - wanted > 2
        )

    @property
    def gaps(self) -> NDArray[np.float32]:
        """As of `Lookahead` [n, F]; for a session that can branch."""
        assert self.ahead.gaps is not None
        return self.ahead.gaps

    @property
    def candidates(self) -> NDArray[np.int32]:
        """As of `Lookahead` [n, F]; for a session that can branch."""
        assert self.ahead.candidates is not None
        return self.ahead.candidates

    def trunk(self) -> Trunk:
        return Trunk(len(self.follower.tokens), self.block_table, self.follower.sampling)

    def push(self, draft: DraftTree) -> DraftTree:
        """The scorer is about to hold `draft`, for which it had to wait."""
        self.hit, self.follower.pushed = False, draft
        return draft

    def push_tree(self) -> DraftTree:
        """The draft and its branches, which the scorer is about to hold."""
        guess, end = self.ahead.guess, self.ahead.end
        branches = [
            (len(guess), b.guess)
            if b.branch[1:] == end
            else (b.branch.accepted, [b.branch.token, *b.guess])
            for b in self.ahead.branches
        ]
        tree = DraftTree.branched(len(self.follower.tokens), guess, branches)
        self.follower.pushed = tree
        return tree

    def drop(self, pool: BlockPool) -> None:
        """Give up all that is held beside the text."""
        self.ahead.drop(pool)
        super().drop(pool)
        if self.mask is not None:
            self.mask.close()
            self.mask = None


class DraftRow(NamedTuple):
    """A session's part in one round."""

    state: DraftState
    start: int  # committed tokens in the cache
    end: int  # the same, after the catch-up forward
    wanted: int  # draft tokens; 0: only the prompt is fed
    num_forked: int = 0  # tokens guessed with candidates; 0: without

    @property
    def sampled(self) -> bool:
        """Its draft is drawn with noise of its own."""
        return self.state.samples and self.wanted > 0

    @property
    def num_tokens(self) -> int:
        """Committed tokens that the catch-up forward is fed."""
        return self.end - self.start

    def slice(self) -> RowSlice:
        state, start, end, _, _ = self
        return RowSlice(state.follower.tokens[start:end], start, state.block_table, 1)

    def ready(self) -> ReadyRow:
        """For a row that drafts."""
        follower, mask = self.state.follower, self.state.mask
        editor = None if mask is None else mask.after(follower.tokens)
        return ReadyRow(self.end, self.wanted, follower.sampling, editor)
