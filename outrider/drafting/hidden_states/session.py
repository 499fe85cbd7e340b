"""Sessions of methods that read the target's hidden states: their text and feature rows.

Row p of a session holds the target's states at position p (`outrider.features`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafting.hidden_states.forward import LEAD
from outrider.drafting.masks import DraftMask, DraftMasks, open_mask
from outrider.drafting.proposer import (
    DraftRound,
    Follower,
    Pace,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.drafting.session_pages import PageCache
from outrider.drafting.sessions import SessionMethod

MAX_FEATURE_BYTES = 2**30
"""Bound of the rows that wait to be used, all sessions together."""

with warnings.catch_warnings():  # torch says once that nobody may write to a tensor of bytes
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)


class HeldRows:
    """The number of rows that the sessions of a method hold together."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class FeatureSession:
    """A session's committed tokens, and the feature rows that are still of use."""

    __slots__ = (
        "_chunks",
        "_held",
        "cache",
        "end",
        "first",
        "follower",
        "key",
        "mask",
        "patient",
        "samples",
    )

    def __init__(
        self,
        key: SessionKey,
        follower: Follower,
        mask: DraftMask | None,
        held: HeldRows,
        *,
        samples: bool,
    ) -> None:
        self.key = key
        self.follower = follower
        self.mask = mask  # of what its constraint forbids
        self.samples = samples  # as `SessionStart` says
        self.cache = PageCache(LEAD - 1)  # empty of methods without one
        self.patient = True  # its first draft may be left out, until there was one
        self.first = 0  # position of the first row that is held
        self.end = 0  # the position after the last row that came or was read elsewhere
        self._held = held
        # bfloat16 [n, width] on the host, one after the other; with n, which `len` takes long for.
        self._chunks: list[tuple[Tensor, int]] = []

    @property
    def num_rows(self) -> int:
        """Rows whose state and next token are known: a draft can begin after all of them."""
        return max(0, min(self.end, len(self.follower.tokens) - 1))

    @property
    def ready(self) -> bool:
        """All rows of the committed text are there, and there is one."""
        return self.num_rows == len(self.follower.tokens) - 1 > 0

    @property
    def num_fresh(self) -> int:
        """Rows that are at hand and not fed."""
        return self.num_rows - self.cache.computed

    @property
    def num_held(self) -> int:
        return self.end - self.first

    def add(self, start: int, rows: Tensor, count: int) -> bool:
        """Append the new part of `rows` [count, width] from position `start`; False for a gap."""
        known = self.end - start
        if known < 0:
            return False
        if known < count:
            # A view would keep the repeated rows.
            self._chunks.append((rows[known:].clone() if known else rows, count - known))
            self.end += count - known
            self._held.count += count - known
        return True

    def rows(self, start: int, end: int) -> Tensor:
        """Return the held rows of positions `start` to `end` - 1: bfloat16 [n, width]."""
        assert self.first <= start < end <= self.end
        parts: list[Tensor] = []
        first = self.first
        for rows, count in self._chunks:
            begin, stop = max(start - first, 0), min(end - first, count)
            if begin < stop:
                parts.append(rows[begin:stop])
            first += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forget(self, before: int) -> None:
        """Drop the rows of positions below `before`."""
        while self._chunks and self.first < before:
            rows, count = self._chunks[0]
            dropped = min(count, before - self.first)
            if dropped == count:
                del self._chunks[0]
            else:  # a view would keep the dropped rows
                self._chunks[0] = rows[dropped:].clone(), count - dropped
            self.first += dropped
            self._held.count -= dropped

    def skip(self, end: int) -> None:
        """Note that rows up to position `end`, exclusive, were read elsewhere and do not come."""
        if self._chunks:
            self.forget(self.end)
        self.first = self.end = end

    def drop(self) -> None:
        """Give up all that is held beside the text."""
        self.forget(self.end)
        if self.mask is not None:
            self.mask.close()
            self.mask = None


class FeatureMethod(SessionMethod[FeatureSession]):
    """Bookkeeping of a `FeatureProposer`; a subclass drafts, and forgets rows that it has used.

    `max_feature_bytes` bounds the rows that sessions hold. Beyond it a session is lost that holds
    many rows, the one that has not been drafted for the longest.
    """

    def __init__(
        self,
        traits: ProposerTraits,
        masks: DraftMasks | None = None,
        *,
        max_feature_bytes: int = MAX_FEATURE_BYTES,
    ) -> None:
        assert traits.features is not None
        super().__init__(traits)
        self._masks = masks
        spec = traits.features
        self._row_width, self._row_bytes = spec.width, spec.row_bytes
        self._max_held = max_feature_bytes // self._row_bytes
        self._held = HeldRows()

    @property
    def projection(self) -> bytes:
        return b""

    def features(self, session: SessionKey, start: int, rows: bytes | memoryview) -> None:
        state = self._sessions.get(session)
        if state is None or state.follower.is_over:
            return
        count, odd = divmod(len(rows), self._row_bytes)
        if odd or not state.add(start, self._unpack(rows), count):
            self._lose(session)
            return
        self._used(state)
        while self._held.count > self._max_held:
            few = self._held.count / len(self._sessions) / 2
            large = (key for key, each in self._sessions.items() if each.num_held > few)
            others = (key for key in large if key != session)
            self._lose(next(others, session))

    @property
    def holds_many(self) -> bool:
        """The rows that sessions hold come near their bound."""
        return self._held.count > self._max_held // 2

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:  # noqa: ARG002
        return DraftRound()

    def _begin(self, key: SessionKey, follower: Follower, start: SessionStart) -> FeatureSession:
        mask = open_mask(self._masks, start)
        return FeatureSession(key, follower, mask, self._held, samples=start.samples)

    def _follow(self, state: FeatureSession, fresh: Sequence[int]) -> None:  # noqa: ARG002
        if state.follower.silent:
            self._release(state)

    def _used(self, state: FeatureSession) -> None:
        """Forget rows of no more use, after rows came or were fed."""

    def _release(self, state: FeatureSession) -> None:
        """Give up what a session holds, also one that is silent."""
        state.drop()

    def _unpack(self, rows: bytes | memoryview) -> Tensor:
        if not rows:
            return torch.empty(0, self._row_width, dtype=torch.bfloat16)
        # Without a copy: rows are megabytes, and only read.
        return torch.frombuffer(rows, dtype=torch.bfloat16).view(-1, self._row_width)
