"""What methods share that keep something of each session: the table of sessions, and its bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from outrider.drafting.proposer import Follower, ProposerTraits, SessionKey, SessionStart

IDLE_S: Final = 5.0
"""A session that no draft was asked of for so long is idle, and gives way to others."""


class FollowedSession(Protocol):
    """What a method keeps of a session."""

    @property
    def key(self) -> SessionKey: ...

    @property
    def follower(self) -> Follower: ...


S = TypeVar("S", bound=FollowedSession)


class SessionMethod(Generic[S]):
    """Bookkeeping of a `Proposer`; a subclass has `draft` and `ahead`, and the hooks below.

    Beyond `traits.max_sessions` newcomers are lost; only a session that is idle gives way to them.
    Several scorers share a proposer, and each fills it by its own count: a session that gave way
    while it is drafted for would be opened anew at the cost of the next, in turns, and each time
    its prompt be processed again.
    """

    def __init__(
        self, traits: ProposerTraits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.traits = traits
        self._clock = clock
        self._sessions: dict[SessionKey, S] = {}  # least recently drafted first
        self._asked_at: dict[SessionKey, float] = {}  # or opened
        self._lost: list[SessionKey] = []

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(self, session: SessionKey, start: SessionStart) -> None:
        assert session not in self._sessions
        if len(self._sessions) >= self.traits.max_sessions:
            idle = self._idle()
            if idle is None or not start.num_draft_tokens:  # what wants no drafts can wait
                self._lost.append(session)
                return
            self._lose(idle)
        self._asked_at[session] = self._clock()
        self._sessions[session] = self._begin(session, Follower(start, self.traits), start)

    def commit(
        self, session: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> None:
        state = self._sessions.get(session)
        if state is None:
            return
        fresh = state.follower.commit(base_len, tokens, num_draft_tokens)
        if fresh is None:
            self._lose(session)
        else:
            self._follow(state, fresh)

    def close(self, session: SessionKey) -> None:
        state = self._sessions.get(session)
        if state is not None:
            self._end(state)
            self.forget(session)

    def forget(self, session: SessionKey) -> None:
        state = self._sessions.pop(session, None)
        if state is not None:
            del self._asked_at[session]
            self._release(state)

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> S:
        """What is kept of a session that begins."""
        raise NotImplementedError

    def _follow(self, state: S, fresh: Sequence[int]) -> None:
        """The text went on with `fresh`: nothing if the scorer repeats itself, or if the session is
        silent (now).
        """
        raise NotImplementedError

    def _end(self, state: S) -> None:
        """The session is over: its text is whole."""

    def _release(self, state: S) -> None:
        """The session is forgotten: what it holds is to be given up, if it was not before."""
        raise NotImplementedError

    def _asked(self, sessions: Sequence[SessionKey]) -> list[S]:
        """Those of `sessions` that are known, which are now the most recently drafted."""
        asked: list[S] = []
        now = self._clock()
        for session in sessions:
            state = self._sessions.pop(session, None)
            if state is not None:
                self._sessions[session] = state
                self._asked_at[session] = now
                asked.append(state)
        return asked

    def _idle(self) -> SessionKey | None:
        """The idle session that no draft was asked of for the longest."""
        first = next(iter(self._sessions), None)
        if first is None or self._clock() - self._asked_at[first] < IDLE_S:
            return None
        return first

    def _makes_room(self, session: SessionKey) -> bool:
        """Loses the longest idle session for what this one needs; without any this one itself, and
        is False.
        """
        idle = self._idle()
        lost = session if idle is None else idle
        self._lose(lost)
        return lost != session

    def _lose(self, session: SessionKey) -> None:
        self.forget(session)
        self._lost.append(session)

    def _take_lost(self) -> list[SessionKey]:
        """The sessions that were lost since it was asked last."""
        lost, self._lost = self._lost, []
        return lost
