"""Prompt lookup: what followed the last time that the text ended the way it ends now.

Saxena, "Prompt Lookup Decoding" (2023), which PaddleNLP calls inference with reference. It needs
no model and pays where output repeats input: edits, summaries, code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.draft_tree import DraftTree
from outrider.drafting.branch_plan import NO_PACE, Pace
from outrider.drafting.proposer import (
    NO_HINTS,
    DraftRound,
    Follower,
    ProposerTraits,
    SessionHints,
    SessionKey,
)
from outrider.errors import ConfigError
from outrider.params import SamplingParams, TokenIds


class NgramProposer:
    """Copies the continuation of the most recent match of the longest n-gram that ends the text.

    N-grams of `prompt_lookup_min` to `prompt_lookup_max` tokens are tried. All sessions together
    hold `max_tokens` tokens at most (about half a kilobyte each); beyond that the session that has
    not been drafted for the longest is lost. Raises `ConfigError`.
    """

    def __init__(
        self,
        *,
        prompt_lookup_min: int = 2,
        prompt_lookup_max: int = 4,
        max_sessions: int = 256,
        max_draft_tokens: int = 16,
        max_model_len: int = 131_072,
        max_tokens: int = 1_000_000,
        max_branches: int = 8,
    ) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ConfigError("prompt_lookup_min must be at least 1, at most prompt_lookup_max.")
        self.traits = ProposerTraits(
            method="ngram",
            model="",
            vocab_size=0,
            max_sessions=max_sessions,
            max_draft_tokens=max_draft_tokens,
            max_model_len=min(max_model_len, max_tokens),
            runs_ahead=max_branches > 0,
        )
        self._sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self._max_tokens = max_tokens
        self._max_branches = max_branches
        self._sessions: dict[SessionKey, _Indexed] = {}  # least recently drafted first
        self._num_tokens = 0
        self._lost: list[SessionKey] = []

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(
        self,
        session: SessionKey,
        prefix: Sequence[int],
        sampling: SamplingParams,
        num_draft_tokens: int,
        max_len: int,
        hints: SessionHints = NO_HINTS,  # noqa: ARG002
    ) -> None:
        assert session not in self._sessions
        follower = Follower(prefix, sampling, num_draft_tokens, max_len, self.traits)
        self._sessions[session] = _Indexed(follower, self._sizes)
        self._num_tokens += len(follower.tokens)
        self._evict(keep=session)

    def commit(
        self, session: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> None:
        indexed = self._sessions.get(session)
        if indexed is None:
            return
        follower = indexed.follower
        before = len(follower.tokens)
        if not follower.commit(base_len, tokens, num_draft_tokens):
            self._lose(session)
            return
        self._num_tokens += len(follower.tokens) - before
        self._evict(keep=session)

    def close(self, session: SessionKey) -> None:
        indexed = self._sessions.pop(session, None)
        if indexed is not None:
            self._num_tokens -= len(indexed.follower.tokens)

    def draft(
        self,
        sessions: Sequence[SessionKey],
        pace: Pace = NO_PACE,  # noqa: ARG002
    ) -> DraftRound:
        done = DraftRound()
        for session in sessions:
            indexed = self._sessions.pop(session, None)
            if indexed is None:
                continue
            self._sessions[session] = indexed  # now the most recently used
            follower = indexed.follower
            if follower.at_hand:
                done.at_hand.append(session)
                continue
            tree = DraftTree.chain(len(follower.tokens), indexed.guess((), follower.wanted))
            follower.pushed = tree
            done.drafts.append((session, tree))
        done.lost.extend(self._lost)
        self._lost.clear()
        return done

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:  # noqa: ARG002
        done = DraftRound()
        for session in sessions:
            indexed = self._sessions.get(session)
            if indexed is not None and indexed.follower.at_hand:
                tree = indexed.branched(self._max_branches)
                if tree != indexed.follower.pushed:
                    indexed.follower.pushed = tree
                    done.trees.append((session, tree))
        return done

    @property
    def _crowded(self) -> bool:
        too_many = len(self._sessions) > self.traits.max_sessions
        return too_many or self._num_tokens > self._max_tokens

    def _evict(self, keep: SessionKey) -> None:
        while self._crowded:
            oldest = next(session for session in self._sessions if session != keep)
            self._lose(oldest)

    def _lose(self, session: SessionKey) -> None:
        self.close(session)
        self._lost.append(session)


class _Indexed:
    """A session with an index from n-gram to the position after its last occurrence.

    Keys are hashes of the n-gram, checked when used: a collision costs a guess, not memory for
    tuples. An n-gram is entered when its next token is known, so a lookup never finds itself.
    """

    def __init__(self, follower: Follower, sizes: range) -> None:
        self.follower = follower
        self._sizes = sizes  # longest first
        self._index: dict[int, int] = {}
        self._indexed = 0  # tokens whose preceding n-grams are in the index

    def guess(self, path: TokenIds, wanted: int) -> list[int]:
        """`wanted` tokens after the committed text and `path`; none where nothing matches."""
        if wanted == 0:
            return []
        found = next(self._matches(path), None)
        if found is None:
            return []
        # The copy may run into what it writes: text of period p goes on with period p.
        period = len(self.follower.tokens) + len(path) - found
        return [self._token(found + i % period, path) for i in range(wanted)]

    def branched(self, max_branches: int) -> DraftTree:
        """The draft at hand, and what would follow where it goes wrong or comes true."""
        follower = self.follower
        chain = follower.at_hand
        base_len = len(follower.tokens)
        branches: list[tuple[int, list[int]]] = []
        # No measurement is needed: whatever was found is few, and costs nothing.
        for accepted in (len(chain), *range(len(chain))):
            path = chain[:accepted]
            for token in self._next_tokens(path):
                room = follower.max_len - base_len - accepted - 2
                if chain[accepted : accepted + 1] != (token,) and room > 0:
                    wanted = min(follower.num_draft_tokens, room)
                    branches.append((accepted, [token, *self.guess((*path, token), wanted)]))
        return DraftTree.branched(base_len, chain, branches[:max_branches])

    def _next_tokens(self, path: TokenIds) -> list[int]:
        """What followed the matches of the text's end, the longest match first."""
        return list(dict.fromkeys([self._token(found, path) for found in self._matches(path)]))

    def _token(self, position: int, path: TokenIds) -> int:
        known = len(self.follower.tokens)
        return self.follower.tokens[position] if position < known else path[position - known]

    def _matches(self, path: TokenIds) -> Iterator[int]:
        """Positions after an earlier occurrence of what the text and `path` end with."""
        tokens = self.follower.tokens
        self._catch_up(tokens)
        longest = self._sizes[0]
        end = [*tokens[-longest:], *path][-longest:]
        for size in self._sizes:
            tail = end[-size:]
            found = self._index.get(hash(tuple(tail)))
            if found is not None and tokens[found - size : found] == tail:
                yield found

    def _catch_up(self, tokens: list[int]) -> None:
        if not tokens:
            self._index.clear()
        for end in range(self._indexed, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._index[hash(tuple(tokens[end - size : end]))] = end
        self._indexed = len(tokens)
