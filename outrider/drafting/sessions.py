"""What methods share that keep something of each session: the table of sessions, and its bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from outrider.drafting.proposer import Follower, ProposerTraits, SessionKey, SessionStart


class FollowedSession(Protocol):
    """What a method keeps of a session."""

    @property
    def key(self) -> SessionKey: ...

    @property
    def follower(self) -> Follower: ...


S = TypeVar("S", bound=FollowedSession)


class SessionMethod(Generic[S]):
    """Bookkeeping of a `Proposer`; a subclass has `draft` and `ahead`, and the hooks below.

    Beyond `traits.max_sessions` the session that has not been drafted for the longest is lost.
    """

    def __init__(self, traits: ProposerTraits) -> None:
        self.traits = traits
        self._sessions: dict[SessionKey, S] = {}  # least recently drafted first
        self._lost: list[SessionKey] = []

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(self, session: SessionKey, start: SessionStart) -> None:
        assert session not in self._sessions
        if len(self._sessions) >= self.traits.max_sessions:
            self._lose(next(iter(self._sessions)))
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
        self._forget(session)

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> S:
        """What is kept of a session that begins."""
        raise NotImplementedError

    def _follow(self, state: S, fresh: Sequence[int]) -> None:
        """The text went on with `fresh`: nothing if the scorer repeats itself, or if the session is
        silent (now)."""
        raise NotImplementedError

    def _release(self, state: S) -> None:
        """The session is over: what it holds is to be given up, if it was not before."""
        raise NotImplementedError

    def _asked(self, sessions: Sequence[SessionKey]) -> list[S]:
        """Those of `sessions` that are known, which are now the most recently drafted."""
        asked: list[S] = []
        for session in sessions:
            state = self._sessions.pop(session, None)
            if state is not None:
                self._sessions[session] = state
                asked.append(state)
        return asked

    def _lose(self, session: SessionKey) -> None:
        self._forget(session)
        self._lost.append(session)

    def _take_lost(self) -> list[SessionKey]:
        """The sessions that were lost since it was asked last."""
        lost, self._lost = self._lost, []
        return lost

    def _forget(self, session: SessionKey) -> S | None:
        state = self._sessions.pop(session, None)
        if state is not None:
            self._release(state)
        return state
