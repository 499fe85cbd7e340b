"""Messages that wait to be sent to a proposer. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Final

from outrider.features import FeatureRows, FeatureWindow
from outrider.rpc import codec
from outrider.rpc.feature_codec import SessionMessage
from outrider.v1 import draft_pb2
from scorer_service.sessions import Session

HELD_TOKENS: Final = 64
"""Tokens that a session without drafts may commit before its proposer is told. They are few to
catch up with when drafts are wanted again, and the proposer is not woken for every token."""

_CROWDED_TOKENS: Final = 2**18
"""Tokens in an outbox that let no more sessions be opened, so that a message holds them all."""

_PROMPT_BYTES: Final = 2 * 2**20
"""Hidden states of prompts in a message, unless one row is more."""


class Outbox:
    """Implements `SessionListener` by messages for one proposer, merged while it is slow.

    Whatever was put since the last `take` travels as one message: one per engine step if the
    proposer keeps up. Commits of a session that wants no drafts are held back. Hidden states of
    prompts, which are megabytes, alternate with the other messages, so that no other session's
    draft waits long for them.
    """

    def __init__(self, max_tokens: int, methods: tuple[str, ...]) -> None:
        self._methods = methods
        self._sent: dict[int, tuple[int, int]] = {}
        """Committed length and number of draft tokens of the last message, by open session."""
        self._max_tokens = max_tokens
        self._batch, self._step_us = draft_pb2.SessionBatch(), 0
        self._features: list[FeatureRows] = []
        self._size = 0
        self._prompts: deque[FeatureRows] = deque()
        """Rows of prompts, and rows that follow them in the same session."""
        self._num_prompts: Counter[int] = Counter()  # by session
        self._prompts_next = False
        self.made_room = False
        """The last message that was taken was large, or had closes: sessions may be opened."""
        self._feature_bytes: Counter[FeatureWindow] = Counter()
        self.taken_feature_bytes: Counter[FeatureWindow] = Counter()
        """Bytes of hidden states in the last message that was taken."""
        self._wake = asyncio.Event()

    @property
    def overflowed(self) -> bool:
        return self._size > self._max_tokens

    @property
    def crowded(self) -> bool:
        return self._size > _CROWDED_TOKENS

    @property
    def num_closing(self) -> int:
        # In a message opens come first, so these sessions have their places until the next `take`.
        return len(self._batch.closes)

    def open(self, session: Session) -> None:
        speculation, constraint = session.request.speculation, session.request.constraint
        advice = speculation.advice
        self._batch.opens.add(
            session=session.id,
            epoch=session.epoch,
            prefix=session.committed,
            sampling=codec.sampling_to_proto(session.request.sampling),
            num_draft_tokens=session.num_draft_tokens,
            max_len=session.max_len,
            traceparent=session.traceparent,
            advice=codec.advice_to_proto(advice),
            constraint=codec.constraint_to_proto(constraint),
            tenant=session.request.tenant,
            methods=[name for name in speculation.methods if name in self._methods],
            verification_rule=codec.RULE_TO_PROTO[speculation.verification.rule],
            num_output_tokens=len(session.committed) - session.num_given_tokens,
        )
        self._sent[session.id] = len(session.committed), session.num_draft_tokens
        source_words = 0 if constraint is None else len(constraint.source) // 4
        advised = len(advice.token_ids) + sum(map(len, advice.references))
        self._grow(len(session.committed) + source_words + advised)

    def commit(self, session: Session, step_us: int) -> None:
        """Send new commits of a session, unless it wants no draft and wanted none before.

        Without new tokens, another number of draft tokens goes with the next ones.
        """
        length, k = self._sent[session.id]
        committed, wanted = len(session.committed), session.num_draft_tokens
        if length == committed:
            return
        if k or wanted or committed - length >= HELD_TOKENS:
            self._step_us = step_us
            self._send_since(session, length)

    def _send_since(self, session: Session, base_len: int) -> None:
        tokens, k, session_id = session.committed[base_len:], session.num_draft_tokens, session.id
        self._batch.commits.add(
            session=session_id,
            epoch=session.epoch,
            base_len=base_len,
            tokens=tokens,
            num_draft_tokens=k,
        )
        self._sent[session_id] = base_len + len(tokens), k
        self._grow(len(tokens))

    def features(self, rows: FeatureRows) -> None:
        if rows.of_prompt or self._num_prompts[rows.session_id]:
            self._prompts.append(rows)
            self._num_prompts[rows.session_id] += 1
            self._wake.set()
        else:
            self._features.append(rows)
            self._feature_bytes[rows.window] += len(rows.rows)
            self._grow(0)

    def close(self, session: Session) -> None:
        length, k = self._sent[session.id]
        if not k and length < len(session.committed):  # a proposer may learn from the whole text
            self._send_since(session, length)
        del self._sent[session.id]
        self._batch.closes.add(session=session.id, epoch=session.epoch)
        self._grow(0)

    async def take(self) -> SessionMessage:
        """Wait until something was put, and return all of it except large states of prompts."""
        await self._wake.wait()
        # A session's Open goes before its rows.
        prompts_next = self._prompts_next and not self._batch.opens
        prompts = bool(self._prompts) and (prompts_next or not self._size)
        self._prompts_next = not prompts
        message = self._take_prompts() if prompts else self._take_batch()
        if not self._size and not self._prompts:
            self._wake.clear()
        return message

    def _take_batch(self) -> SessionMessage:
        self._batch.step_us, self._step_us = self._step_us, 0
        message = SessionMessage(self._batch, self._features)
        self.made_room = self.crowded or self.num_closing > 0
        self.taken_feature_bytes, self._feature_bytes = self._feature_bytes, Counter()
        self._batch, self._features, self._size = draft_pb2.SessionBatch(), [], 0
        return message

    def _take_prompts(self) -> SessionMessage:
        sent: list[FeatureRows] = []
        self.made_room = False
        self.taken_feature_bytes = Counter()
        room = _PROMPT_BYTES
        while self._prompts and room > 0:
            part, left = _divided(self._prompts.popleft(), room)
            sent.append(part)
            room -= len(part.rows)
            self.taken_feature_bytes[part.window] += len(part.rows)
            if left is not None:
                self._prompts.appendleft(left)
                continue
            self._num_prompts[part.session_id] -= 1
            if not self._num_prompts[part.session_id]:
                del self._num_prompts[part.session_id]
        return SessionMessage(draft_pb2.SessionBatch(), sent)

    def _grow(self, tokens: int) -> None:
        if not self._size:
            self._wake.set()
        self._size += 1 + tokens


def _divided(rows: FeatureRows, size: int) -> tuple[FeatureRows, FeatureRows | None]:
    """Return as many rows as `size` bytes hold, at least one, and the others."""
    row_bytes = rows.order.spec.row_bytes
    count = max(1, size // row_bytes)
    end = count * row_bytes
    if end >= len(rows.rows):
        return rows, None
    states = memoryview(rows.rows)
    return (
        rows._replace(rows=states[:end]),
        rows._replace(start=rows.start + count, rows=states[end:]),
    )
