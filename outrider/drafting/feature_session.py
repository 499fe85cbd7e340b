"""What methods that read the target's hidden states share: sessions, their text and feature rows.

Row p of a session holds the target's states at position p (`outrider.features`). A subclass of
`FeatureMethod` says how to draft, and forgets rows that it has used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafting.branch_plan import NO_PACE, Pace
from outrider.drafting.proposer import (
    DraftRound,
    Follower,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.features import FeatureSpec

MAX_FEATURE_BYTES = 2**30
"""Rows that wait to be used, all sessions together."""


class HeldRows:
    """How many rows the sessions of a method hold together."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class FeatureSession:
    """A session's committed tokens, and the feature rows that are still of use."""

    __slots__ = ("_chunks", "_held", "end", "first", "follower", "key", "samples")

    def __init__(
        self, key: SessionKey, follower: Follower, held: HeldRows, *, samples: bool
    ) -> None:
        self.key = key
        self.follower = follower
        self.samples = samples  # as `SessionStart` says
        self.first = 0  # position of the first row that is held
        self.end = 0  # the position after the last row that came
        self._held = held
        self._chunks: list[Tensor] = []  # bfloat16 [n, width] on the host, one after the other

    @property
    def num_rows(self) -> int:
        """Rows p whose state and next token are known: a draft can begin after all of them."""
        return max(0, min(self.end, len(self.follower.tokens) - 1))

    @property
    def ready(self) -> bool:
        """All rows of the committed text are there, and there is one."""
        return self.num_rows == len(self.follower.tokens) - 1 > 0

    @property
    def num_held(self) -> int:
        return self.end - self.first

    def add(self, start: int, rows: Tensor) -> bool:
        """Appends what is new of `rows` [n, width], from position `start`; False for a gap."""
        if start > self.end:
            return False
        fresh = rows[self.end - start :]
        if len(fresh) < len(rows):
            fresh = fresh.clone()  # a view would keep the repeated rows
        if len(fresh):
            self._chunks.append(fresh)
            self.end += len(fresh)
            self._held.count += len(fresh)
        return True

    def rows(self, start: int, end: int) -> Tensor:
        """The rows of positions `start` to `end` - 1, which are held: bfloat16 [n, width]."""
        assert self.first <= start < end <= self.end
        parts: list[Tensor] = []
        first = self.first
        for chunk in self._chunks:
            part = chunk[max(0, start - first) : max(0, end - first)]
            if len(part):
                parts.append(part)
            first += len(chunk)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forget(self, before: int) -> None:
        """Drops the rows of positions below `before`."""
        while self._chunks and self.first < before:
            chunk = self._chunks[0]
            dropped = min(len(chunk), before - self.first)
            if dropped == len(chunk):
                del self._chunks[0]
            else:
                self._chunks[0] = chunk[dropped:].clone()  # a view would keep the dropped rows
            self.first += dropped
            self._held.count -= dropped


class FeatureMethod:
    """Bookkeeping of a `FeatureProposer`; a subclass has `draft`, and may extend the hooks.

    Sessions are bounded by `traits.max_sessions`, the rows that they hold by `max_feature_bytes`;
    beyond these the session that has not been drafted for the longest is lost; for the sake of
    rows none that holds few of them itself.
    """

    def __init__(
        self, traits: ProposerTraits, *, max_feature_bytes: int = MAX_FEATURE_BYTES
    ) -> None:
        assert traits.features is not None
        self.traits = traits
        self._spec: FeatureSpec = traits.features
        self._max_held = max_feature_bytes // self._spec.row_bytes
        self._held = HeldRows()
        self._sessions: dict[SessionKey, FeatureSession] = {}  # least recently drafted first
        self._lost: list[SessionKey] = []

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def projection(self) -> bytes:
        return b""

    def open(self, session: SessionKey, start: SessionStart) -> None:
        assert session not in self._sessions
        if len(self._sessions) >= self.traits.max_sessions:
            self._lose(next(iter(self._sessions)))
        follower = Follower(start, self.traits)
        state = FeatureSession(session, follower, self._held, samples=start.samples)
        self._sessions[session] = state
        self._opened(state, start)

    def features(self, session: SessionKey, start: int, rows: bytes) -> None:
        state = self._sessions.get(session)
        if state is None or state.follower.silent:
            return
        if len(rows) % self._spec.row_bytes or not state.add(start, self._unpack(rows)):
            self._lose(session)
            return
        self._used(state)
        while self._held.count > self._max_held:
            few = self._held.count / len(self._sessions) / 2
            large = (key for key, each in self._sessions.items() if each.num_held > few)
            others = (key for key in large if key != session)
            self._lose(next(others, session))

    def commit(
        self, session: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> None:
        state = self._sessions.get(session)
        if state is None:
            return
        if not state.follower.commit(base_len, tokens, num_draft_tokens):
            self._lose(session)
        elif state.follower.silent:
            state.forget(state.end)
            self._closed(state)
        else:
            self._used(state)

    def close(self, session: SessionKey) -> None:
        state = self._sessions.pop(session, None)
        if state is not None:
            state.forget(state.end)
            self._closed(state)

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        raise NotImplementedError

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:  # noqa: ARG002
        return DraftRound()

    def _opened(self, state: FeatureSession, start: SessionStart) -> None:
        """A session began."""

    def _used(self, state: FeatureSession) -> None:
        """Rows or tokens came: what is of no more use may be forgotten."""

    def _closed(self, state: FeatureSession) -> None:
        """A session is over, lost or silent: what it holds is to be given up. May be repeated."""

    def _asked(self, sessions: Sequence[SessionKey]) -> list[FeatureSession]:
        """Those of `sessions` that are known, which are now the most recently drafted."""
        asked: list[FeatureSession] = []
        for session in sessions:
            state = self._sessions.pop(session, None)
            if state is not None:
                self._sessions[session] = state
                asked.append(state)
        return asked

    def _lose(self, session: SessionKey) -> None:
        self.close(session)
        self._lost.append(session)

    def _take_lost(self) -> list[SessionKey]:
        """The sessions that were lost since it was asked last."""
        lost, self._lost = self._lost, []
        return lost

    def _unpack(self, rows: bytes) -> Tensor:
        if not rows:
            return torch.empty(0, self._spec.width, dtype=torch.bfloat16)
        flat = torch.frombuffer(bytearray(rows), dtype=torch.bfloat16)
        return flat.view(-1, self._spec.width)
