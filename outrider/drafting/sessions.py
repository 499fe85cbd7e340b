"""The bounded table of sessions of a drafting method."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from outrider.drafting.proposer import Follower, ProposerTraits, SessionKey, SessionStart

IDLE_S: Final = 5.0
"""After so long without a request for a draft a session is idle, and gives way to others."""


class FollowedSession(Protocol):
    """A method's state of a session."""

    key: SessionKey
    follower: Follower


S = TypeVar("S", bound=FollowedSession)


class SessionMethod(Generic[S]):
    """Bookkeeping of a `Proposer`; a subclass has `draft` and `ahead`, and the hooks below.

    Beyond `traits.max_sessions` newcomers are lost; only an idle session gives way to them. Several
    scorers may overfill a shared proposer. If busy sessions gave way, each would be opened anew at
    the cost of the next, and its prompt be processed again.
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
            if idle is None or not start.num_draft_tokens:  # without drafts it can wait
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
        """Return the state of a session that begins."""
        raise NotImplementedError

    def _follow(self, state: S, fresh: Sequence[int]) -> None:
        """Continue the text by `fresh`, which is empty for repeats and silent sessions."""
        raise NotImplementedError

    def _end(self, state: S) -> None:
        """Note that the session is over, with its text complete."""

    def _release(self, state: S) -> None:
        """Give up the resources of a session that is forgotten, if it still has some."""
        raise NotImplementedError

    def _asked(self, sessions: Sequence[SessionKey]) -> list[S]:
        """Return the known ones of `sessions`, and make them the most recently drafted."""
        asked: list[S] = []
        now = self._clock()
        if [*self._sessions] == [*sessions]:  # as often: their order stays
            self._asked_at = dict.fromkeys(sessions, now)
            return [*self._sessions.values()]
        for session in sessions:
            state = self._sessions.pop(session, None)
            if state is not None:
                self._sessions[session] = state
                self._asked_at[session] = now
                asked.append(state)
        return asked

    def _idle(self) -> SessionKey | None:
        """Return the session that was idle for the longest."""
        first = next(iter(self._sessions), None)
        if first is None or self._clock() - self._asked_at[first] < IDLE_S:
            return None
        return first

    def _makes_room(self, session: SessionKey) -> bool:
        """Lose the longest idle session for another; False if none is idle: it is lost itself."""
        idle = self._idle()
        lost = session if idle is None else idle
        self._lose(lost)
        return lost != session

    def _lose(self, session: SessionKey) -> None:
        self.forget(session)
        self._lost.append(session)

    def _take_lost(self) -> list[SessionKey]:
        """Return the sessions that were lost since the last call."""
        lost, self._lost = self._lost, []
        return lost
