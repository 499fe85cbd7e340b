"""Prompt lookup: what followed the last time that the text ended the way it ends now.

Saxena, "Prompt Lookup Decoding" (2023), which PaddleNLP calls inference with reference. It needs
no model and pays where output repeats input: edits, summaries, code.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.draft_tree import DraftTree
from outrider.drafting.proposer import DraftRound, Follower, ProposerTraits, SessionKey
from outrider.errors import ConfigError
from outrider.types import SamplingParams


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
        )
        self._sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self._max_tokens = max_tokens
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

    def draft(self, sessions: Sequence[SessionKey]) -> DraftRound:
        done = DraftRound()
        for session in sessions:
            indexed = self._sessions.pop(session, None)
            if indexed is not None:
                self._sessions[session] = indexed  # now the most recently used
                base_len = len(indexed.follower.tokens)
                done.drafts.append((session, DraftTree.chain(base_len, indexed.guess())))
        done.lost.extend(self._lost)
        self._lost.clear()
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

    def guess(self) -> list[int]:
        """At most `follower.wanted` tokens; none where nothing matches."""
        tokens, wanted = self.follower.tokens, self.follower.wanted
        self._catch_up(tokens)
        if wanted == 0:
            return []
        for size in self._sizes:
            tail = tokens[-size:]
            found = self._index.get(hash(tuple(tail)))
            if found is not None and tokens[found - size : found] == tail:
                # The copy may run into what it writes: text of period p goes on with period p.
                period = len(tokens) - found
                return [tokens[found + i % period] for i in range(wanted)]
        return []

    def _catch_up(self, tokens: list[int]) -> None:
        if not tokens:
            self._index.clear()
        for end in range(self._indexed, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._index[hash(tuple(tokens[end - size : end]))] = end
        self._indexed = len(tokens)
