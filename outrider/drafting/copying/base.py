"""What methods that copy tokens share: sessions and their limits, drafts, and branches ahead.

Such a method needs no model. It says where one session may copy from (`Source`); everything else is
here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypedDict

from outrider.draft_tree import DraftTree
from outrider.drafting.proposer import (
    NO_PACE,
    DraftRound,
    Follower,
    Pace,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.drafting.sessions import SessionMethod
from outrider.params import TokenIds

_READ_AT_ONCE: Final = 4096
"""Tokens of new texts that a call goes through, 3 to 10 ms of prompt lookup: sessions beside them
wait for it."""
_READ_AT_LEAST: Final = 128  # of each session: more than a round commits, so that it misses none


class Source(Protocol):
    """What one session copies from. It reads the session's text from its follower."""

    @property
    def num_tokens(self) -> int:
        """Tokens held in memory for the session, its text included."""
        ...

    def read(self, most: int) -> int:
        """Goes through `most` tokens at most of those that must be known before it is asked.

        Returns how many: fewer if that was all.
        """
        ...

    def guess(self, path: TokenIds, wanted: int) -> Sequence[int]:
        """At most `wanted` tokens after the committed text and `path`."""
        ...

    def alternatives(self, path: TokenIds) -> Sequence[int]:
        """Tokens that may come after the committed text and `path`, the likeliest first."""
        ...

    def commit(self) -> None:
        """The follower's text has grown."""
        ...

    def end(self) -> None:
        """The session is over; not called for one that is forgotten."""
        ...


class _Session:
    """A session's text, and what it copies from."""

    def __init__(self, key: SessionKey, follower: Follower, source: Source) -> None:
        self.key = key
        self.follower = follower
        self.source = source
        self.num_tokens = 0

    def draft(self) -> DraftTree | None:
        """What to send; None if the scorer holds it."""
        follower = self.follower
        if follower.at_hand:
            return None
        wanted = follower.wanted
        guess = tuple(self.source.guess((), wanted)) if wanted else ()
        # A draft may be shorter than what is wanted, and so may be what is left of a longer one.
        if guess and follower.pushed and follower.pushed.first_path(len(guess)) == guess:
            return None
        follower.pushed = DraftTree.chain(follower.length, guess)
        return follower.pushed

    def branched(self, max_branches: int) -> DraftTree | None:
        """The draft that is verified, and what would follow where it goes wrong or comes true.

        None if the scorer knows it all.
        """
        follower = self.follower
        pushed, wanted = follower.pushed, follower.wanted
        chain = pushed.first_path(wanted) if pushed and wanted else ()
        if not chain:
            return None
        base_len = len(follower.tokens)
        branches: list[tuple[int, list[int]]] = []
        # No measurement is needed: whatever was found is few, and costs nothing.
        for accepted in (len(chain), *range(len(chain))):
            path = chain[:accepted]
            room = follower.max_len - base_len - accepted - 2
            if room <= 0 or len(branches) >= max_branches:
                continue
            for token in self.source.alternatives(path):
                if chain[accepted : accepted + 1] != (token,):
                    rest = self.source.guess((*path, token), min(follower.num_draft_tokens, room))
                    branches.append((accepted, [token, *rest]))
        tree = DraftTree.branched(base_len, chain, branches[:max_branches])
        if tree == pushed:
            return None
        follower.pushed = tree
        return tree


class Limits(TypedDict, total=False):
    """What every method that copies is told."""

    max_sessions: int
    max_model_len: int
    max_tokens: int  # held, all sessions together
    max_branches: int  # per session
    clock: Callable[[], float]


class CopyingProposer(SessionMethod[_Session]):
    """Drafts by copying; a subclass says from where. Needs no model, and so no vocabulary.

    All sessions together hold `max_tokens` tokens at most; beyond that idle ones are lost, without
    any the one that there is no room for.
    """

    def __init__(
        self,
        method: str,
        *,
        max_draft_tokens: int,
        max_sessions: int = 256,
        max_model_len: int = 131_072,
        max_tokens: int = 1_000_000,
        max_branches: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(
            ProposerTraits(
                method=method,
                model="",
                vocab_size=0,
                max_sessions=max_sessions,
                max_draft_tokens=max_draft_tokens,
                max_model_len=min(max_model_len, max_tokens),
                runs_ahead=max_branches > 0,
            ),
            clock,
        )
        self._max_tokens = max_tokens
        self._max_branches = max_branches
        self._num_tokens = 0

    def _source(self, follower: Follower, start: SessionStart) -> Source:
        raise NotImplementedError

    def open(self, session: SessionKey, start: SessionStart) -> None:
        super().open(session, start)
        state = self._sessions.get(session)
        if state is not None:  # there was room
            self._resize(state)

    def draft(
        self,
        sessions: Sequence[SessionKey],
        pace: Pace = NO_PACE,  # noqa: ARG002
    ) -> DraftRound:
        done = DraftRound()
        room = _READ_AT_ONCE
        for state in self._asked(sessions):
            most = max(room, _READ_AT_LEAST)
            read = state.source.read(most)
            room -= read
            if read == most:
                done.unfinished.append(state.key)
                continue
            tree = state.draft()
            if tree is None:
                done.at_hand.append(state.key)
            else:
                done.drafts.append((state.key, tree))
        done.lost.extend(self._take_lost())
        return done

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:  # noqa: ARG002
        done = DraftRound()
        for session in sessions:
            state = self._sessions.get(session)
            tree = None if state is None else state.branched(self._max_branches)
            if tree is not None:
                done.trees.append((session, tree))
        return done

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> _Session:
        return _Session(key, follower, self._source(follower, start))

    def _follow(self, state: _Session, fresh: Sequence[int]) -> None:  # noqa: ARG002
        state.source.commit()
        self._resize(state)

    def _end(self, state: _Session) -> None:
        state.source.end()

    def _release(self, state: _Session) -> None:
        self._num_tokens -= state.num_tokens

    def _resize(self, state: _Session) -> None:
        """Accounts for what a session holds now, and makes room for it."""
        num_tokens = state.source.num_tokens
        self._num_tokens += num_tokens - state.num_tokens
        state.num_tokens = num_tokens
        while self._num_tokens > self._max_tokens and len(self._sessions) > 1:
            if not self._makes_room(state.key):
                return
