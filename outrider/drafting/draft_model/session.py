"""A draft model's sessions: their text, the state of the cache, and guesses past the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.draft_tree import DraftTree
from outrider.drafting.ahead.branches import Trunk
from outrider.drafting.ahead.lookahead import Lookahead
from outrider.drafting.ahead.outcomes import Outcomes
from outrider.drafting.async_drafts import AsyncRow
from outrider.drafting.drafters import DraftInput
from outrider.drafting.masks import DraftMask
from outrider.drafting.proposer import Follower, SessionKey, SessionStart
from outrider.drafting.session_pages import PageCache
from outrider.engine.batch import RowSlice
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.params import TokenIds

SHORT: Final = 16
"""Tokens to catch up that never wait for the prefill budget: those of a round or two."""


class DraftState(PageCache):
    """A session's tokens, and what the cache holds of them and past them."""

    __slots__ = ("ahead", "follower", "hit", "key", "mask", "patient", "samples")

    def __init__(
        self, key: SessionKey, follower: Follower, start: SessionStart, mask: DraftMask | None
    ) -> None:
        super().__init__()
        self.key = key
        self.follower = follower
        self.mask = mask  # of its constraint
        self.samples = start.samples
        self.patient = True  # its first draft may be left out, until there was one
        self.ahead = Lookahead()  # follows the computed tokens in the pages
        self.hit = False  # the draft in verification was at hand when it was wanted

    @property
    def at_hand(self) -> bool:
        """The scorer holds the next draft already, and so does the cache."""
        path = self.follower.at_hand if self.ahead.forks is None else self.held
        return bool(path) and self.ahead.guess[: len(path)] == [*path]

    @property
    def held(self) -> TokenIds:
        """The part of what was pushed that the scorer verifies: a short draft rather than none."""
        return self.follower.held(self.follower.wanted)

    def follow(self, pool: BlockPool, fresh: Sequence[int], outcomes: Outcomes) -> None:
        """Follow a text that went on with `fresh`: its guessed part is computed already."""
        if self.computed != len(self.follower.tokens) - len(fresh):
            return  # the prompt is not through, or nothing was drafted since the last commit
        ahead = self.ahead
        if ahead.forks is not None:
            outcomes.observe(ahead.forks, fresh, hit=self.hit)
        self.computed += ahead.follow(pool, self.block_table, fresh)

    def give_up_guesses(self, pool: BlockPool) -> int:
        """Drop all guesses; return how many committed tokens are to be fed.

        At least one: the draft begins with the last token's logits.
        """
        self.ahead.drop(pool)
        length = len(self.follower.tokens)
        self.computed = min(self.computed, length - 1)
        return length - self.computed

    def can_branch(self, room: int) -> bool:
        """Return whether branches of the draft are possible and useful.

        `room` is the longest text that a branch may begin with.
        """
        follower, ahead = self.follower, self.ahead
        wanted, length = follower.wanted, len(follower.tokens)
        return (
            wanted > 0
            and ahead.forks is not None
            and not ahead.branches
            and self.computed == length
            and length + len(ahead.guess) < room
            and follower.max_len - length - wanted > 2
        )

    @property
    def past_prompt(self) -> bool:
        """The session is drafted for round by round."""
        return self.follower.wanted > 0 and len(self.follower.tokens) - self.computed <= SHORT

    def input_behind(self, row: AsyncRow, pool: BlockPool, page_size: int) -> DraftInput | None:
        """Return places for the two tokens at most that a step adds to text and guesses.

        None if the next draft cannot be made behind the step that verifies `row`.
        """
        length, num_guesses, wanted = len(self.follower.tokens), len(self.ahead.guess), row.wanted
        start = length + num_guesses
        if (
            self.computed == length > 0
            and self.mask is None
            and not self.samples
            and self.ahead.forks is None
            and not row.is_tree
            and row.max_accepted <= num_guesses + 1
            and self.cover(pool, start + 2 + wanted - 1, page_size)
        ):
            places = RowSlice((num_guesses, 0), start, self.block_table, 1)
            return DraftInput(places, wanted, self.follower.sampling)
        return None

    def continues(self, row: DraftInput) -> bool:
        """Return whether a draft that was launched for `row` continues the text."""
        num_guesses, length = row.slice.token_ids[0], len(self.follower.tokens)
        before = row.slice.start - num_guesses
        if length <= before:
            return False
        kept = min(length - 1 - before, num_guesses)
        return min(self.computed, length - 1) == before + kept

    def take_async(self, pool: BlockPool, chain: list[int]) -> DraftTree:
        """Return the draft of a loop that has fed the text."""
        self.ahead.drop(pool)
        self.computed = length = len(self.follower.tokens)
        self.ahead.guess, self.patient = chain[:-1], False
        return self.push(DraftTree.chain(length, chain))

    def trunk(self) -> Trunk:
        return Trunk(len(self.follower.tokens), self.block_table, self.follower.sampling)

    def push(self, draft: DraftTree) -> DraftTree:
        """Note that the scorer is about to hold `draft`, for which it had to wait."""
        self.hit = False
        self.follower.push(draft)
        return draft

    def drop(self, pool: BlockPool) -> None:
        """Give up all that is held beside the text."""
        self.ahead.drop(pool)
        super().drop(pool)
        if self.mask is not None:
            self.mask.close()
            self.mask = None


@dataclass(frozen=True, slots=True)
class DraftRow:
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

    @property
    def short(self) -> bool:
        return self.num_tokens <= SHORT

    def can_fork(self, num_tokens: int, max_model_len: int) -> bool:
        """Return whether its draft may come with candidates, and be of so many tokens."""
        free = not self.state.samples and self.state.mask is None
        fits = self.end + num_tokens <= max_model_len
        return self.wanted > 0 and self.short and fits and free

    def slice(self) -> RowSlice:
        tokens = self.state.follower.tokens[self.start : self.end]
        return RowSlice(tokens, self.start, self.state.block_table, 1)

    def input(self) -> DraftInput:
        follower, mask = self.state.follower, self.state.mask
        editor = mask.after(follower.tokens) if mask is not None and self.wanted else None
        return DraftInput(self.slice(), self.wanted, follower.draft_sampling, editor)
