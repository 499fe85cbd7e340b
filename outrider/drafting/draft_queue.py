"""The sessions of a drafting method that want a draft."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from outrider.drafting.proposer import FeatureProposer, Proposer, SessionKey, SessionStart


@dataclass(slots=True)
class _Progress:
    length: int  # committed tokens
    num_rows: int = 0  # positions whose hidden states the method has
    waits_for_rows: bool = False


class DraftQueue:
    """Forwards what happens to sessions to a method, and notes which of them want a draft.

    A session that lacks hidden states of committed tokens wants none until more of them come.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        spec = proposer.traits.features
        self._reader = None if spec is None else cast("FeatureProposer", proposer)
        self._row_bytes = 0 if spec is None else spec.row_bytes
        self._sessions: dict[SessionKey, _Progress] = {}  # if hidden states are read
        self._keys = itertools.count(1)
        self.wanting: dict[SessionKey, None] = {}
        """Sessions that want a draft, in the order in which they asked."""

    def new_key(self) -> SessionKey:
        return next(self._keys)

    def open(self, key: SessionKey, start: SessionStart) -> None:
        if self._reader is not None:
            self._sessions[key] = _Progress(len(start.prefix))
        self._proposer.open(key, start)
        self._want(key, start.num_draft_tokens)

    def commit(
        self, key: SessionKey, base_len: int, tokens: Sequence[int], num_draft_tokens: int
    ) -> None:
        self._proposer.commit(key, base_len, tokens, num_draft_tokens)
        if self._reader is not None:
            session, length = self._sessions[key], base_len + len(tokens)
            if length > session.length:
                session.length = length
            session.waits_for_rows = False
        self._want(key, num_draft_tokens)

    def features(self, key: SessionKey, start: int, rows: bytes | memoryview) -> None:
        """Forward hidden states, unless the method reads none."""
        if self._reader is None:
            return
        session = self._sessions[key]
        session.num_rows = max(session.num_rows, start + len(rows) // self._row_bytes)
        self._reader.features(key, start, rows)
        if session.waits_for_rows:
            session.waits_for_rows = False
            self._want(key, 1)

    def answered(self, key: SessionKey) -> None:
        """Note that a session has its draft."""
        del self.wanting[key]

    def unfinished(self, key: SessionKey) -> None:
        """Note that the method could not draft for a session yet."""
        session = self._sessions.get(key)
        if session is None:
            return
        if session.num_rows < max(1, session.length - 1):
            del self.wanting[key]
            session.waits_for_rows = True

    def close(self, key: SessionKey) -> None:
        """End a session whose text is complete."""
        self.drop(key)
        self._proposer.close(key)

    def forget(self, key: SessionKey) -> None:
        """End a session whose text goes on elsewhere."""
        self.drop(key)
        self._proposer.forget(key)

    def drop(self, key: SessionKey) -> None:
        """Forget a session that the method does not know any more."""
        self._sessions.pop(key, None)
        self.wanting.pop(key, None)

    def _want(self, key: SessionKey, num_draft_tokens: int) -> None:
        if num_draft_tokens:
            self.wanting[key] = None
        else:
            self.wanting.pop(key, None)
