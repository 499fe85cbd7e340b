"""Drafting by copying tokens: sessions and their limits, drafts, and branches ahead.

Such a method needs no model. A subclass of `CopyingProposer` says where one session may copy from
(`Source`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypedDict

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
"""Tokens of new texts that one call reads, so that other sessions do not wait long."""
_READ_AT_LEAST: Final = 128  # of each session: more than a round commits, so that it misses none


class Copied(NamedTuple):
    """Copied tokens, and how sure they are by what was matched (`outrider.drafting.confidence`)."""

    token_ids: Sequence[int]
    confidences: bytes


NOTHING: Final = Copied((), b"")


class Source:
    """The text that one session copies from. It reads the session's own from `follower`."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    @property
    def num_tokens(self) -> int:
        """Tokens held in memory for the session, its text included."""
        return len(self.follower.tokens)

    def read(self, most: int) -> int:  # noqa: ARG002
        """Read at most `most` tokens that a guess needs; return their number.

        Fewer than `most` means that all are read.
        """
        return 0

    def guess(self, path: TokenIds, wanted: int) -> Copied:
        """Return at most `wanted` tokens after the committed text and `path`."""
        raise NotImplementedError

    def alternatives(self, path: TokenIds) -> Sequence[int]:
        """Return tokens that may follow the committed text and `path`, the likeliest first."""
        return self.guess(path, 1).token_ids

    def commit(self) -> None:
        """Take note that the follower's text has grown."""

    def end(self) -> None:
        """Take note that the session is over; not called for one that is forgotten."""


class _Session:
    """A session's text and its source."""

    def __init__(self, key: SessionKey, source: Source) -> None:
        self.key = key
        self.follower = source.follower
        self.source = source
        self.num_tokens = 0

    def draft(self) -> DraftTree | None:
        """Return the draft to send; None if the scorer holds it."""
        follower = self.follower
        if follower.at_hand:
            return None
        wanted = follower.wanted
        copied = self.source.guess((), wanted) if wanted else NOTHING
        guess = tuple(copied.token_ids)
        # A draft may be shorter than wanted, and so may the remainder of a longer one.
        if guess and follower.held(len(guess)) == guess:
            return None
        tree = DraftTree.chain(follower.length, guess, (), copied.confidences)
        follower.push(tree)
        return tree

    def branched(self, max_branches: int) -> DraftTree | None:
        """Return the draft that is verified, with branches for the outcomes of verifying it.

        None if the scorer has all of it.
        """
        follower = self.follower
        pushed, wanted = follower.pushed, follower.wanted
        if not (pushed and wanted and (chain := pushed.first_path(wanted))):
            return None
        base_len = len(follower.tokens)
        branches: list[tuple[int, list[int]]] = []
        told = [pushed.first_confidences(len(chain))]
        for accepted in (len(chain), *range(len(chain))):
            path = chain[:accepted]
            room = follower.max_len - base_len - accepted - 2
            if room <= 0 or len(branches) >= max_branches:
                continue
            for token in self.source.alternatives(path):
                if chain[accepted : accepted + 1] != (token,) and len(branches) < max_branches:
                    rest = self.source.guess((*path, token), min(follower.num_draft_tokens, room))
                    branches.append((accepted, [token, *rest.token_ids]))
                    told += (b"\0", rest.confidences)  # a branch begins where the text left others
        tree = DraftTree.branched(base_len, chain, branches, b"".join(told))
        if tree == pushed:
            return None
        follower.push(tree)
        return tree


class Limits(TypedDict, total=False):
    """The limits of every method that copies."""

    max_sessions: int
    max_model_len: int
    max_tokens: int  # held, all sessions together
    max_branches: int  # per session
    clock: Callable[[], float]


class CopyingProposer(SessionMethod[_Session]):
    """Drafts by copying from a subclass's `Source`.

    All sessions together hold at most `max_tokens` tokens. Beyond that idle sessions are lost,
    and without any the session that there is no room for.
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
        return _Session(key, self._source(follower, start))

    def _follow(self, state: _Session, fresh: Sequence[int]) -> None:  # noqa: ARG002
        state.source.commit()
        self._resize(state)

    def _end(self, state: _Session) -> None:
        state.source.end()

    def _release(self, state: _Session) -> None:
        self._num_tokens -= state.num_tokens

    def _resize(self, state: _Session) -> None:
        """Account for the tokens that a session holds now, and make room for them."""
        num_tokens = state.source.num_tokens
        self._num_tokens += num_tokens - state.num_tokens
        state.num_tokens = num_tokens
        while self._num_tokens > self._max_tokens and len(self._sessions) > 1:
            if not self._makes_room(state.key):
                return
