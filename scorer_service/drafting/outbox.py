"""What waits to be sent to a proposer. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.features import FeatureRows, FeatureWindow
from outrider.rpc import codec
from outrider.rpc.feature_codec import SentRows, SessionMessage
from outrider.v1 import draft_pb2
from scorer_service.sessions import Session

HELD_TOKENS: Final = 64
"""That a session without drafts may commit before its proposer is told: it has few to catch up with
when drafts are wanted again, and is not woken for every token meanwhile."""

_CROWDED_TOKENS: Final = 2**18
"""Waiting in an outbox: other sessions are opened later, or all of them together would be more
than a message holds, and more than may wait."""

_PROMPT_BYTES: Final = 2 * 2**20
"""Of prompts' states in a message, if a row is no more: what others wait for."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Rows of a session that follow rows of prompts."""

    session: int
    epoch: int
    rows: FeatureRows

    def divided(self, size: int) -> tuple[SentRows, _Waiting | None]:
        """As many rows as `size` bytes hold, but one at least, and the others."""
        rows, row_bytes = self.rows, self.rows.order.spec.row_bytes
        count = max(1, size // row_bytes)
        end = count * row_bytes
        sent = SentRows(self.session, self.epoch, rows.start, memoryview(rows.rows)[:end])
        if end >= len(rows.rows):
            return sent, None
        left = rows._replace(start=rows.start + count, rows=memoryview(rows.rows)[end:])
        return sent, _Waiting(self.session, self.epoch, left)


class Recipient(Protocol):
    """What a proposer is told of its sessions, however it is told."""

    on_demand: bool
    """Drafts are not to be made ahead."""

    @property
    def overflowed(self) -> bool:
        """More waits than may."""
        ...

    @property
    def crowded(self) -> bool:
        """So much waits that sessions are better opened later."""
        ...

    @property
    def num_closing(self) -> int:
        """Sessions that it does not know yet to be over."""
        ...

    def open(self, session: Session) -> None: ...

    def commit(self, session: Session, step_us: int) -> None: ...

    def features(self, session: Session, rows: FeatureRows) -> None: ...

    def close(self, session: Session) -> None: ...


class Outbox:
    """Implements `Recipient`. Messages for one proposer, merged while it is slow; bounded.

    Whatever was put since the last `take` travels as one message: one per engine step if the
    proposer keeps up. Of a session for which nothing is drafted, some is held back. The states of
    prompts, which are megabytes, travel in messages of their own, in turns with the others: no
    other session's draft waits long for them.
    """

    def __init__(self, max_tokens: int, methods: tuple[str, ...]) -> None:
        self._methods = methods
        self._told: dict[int, tuple[int, int]] = {}
        """By open session: the committed length and the number of draft tokens told last."""
        self._max_tokens = max_tokens
        self._batch = draft_pb2.SessionBatch()
        self.on_demand = False
        """Drafts are not to be made ahead; said with every message."""
        self._features: list[SentRows] = []
        self._size = 0
        self._behind: deque[_Waiting] = deque()
        self._num_behind: Counter[int] = Counter()  # by session
        self._turn_of_prompts = False
        self.made_room = False
        """The last message that was taken was large, or had closes: others may have waited."""
        self._feature_bytes: Counter[FeatureWindow] = Counter()
        self.taken_feature_bytes: Counter[FeatureWindow] = Counter()
        """In the last message that was taken."""
        self._wake = asyncio.Event()

    @property
    def overflowed(self) -> bool:
        return self._size > self._max_tokens

    @property
    def crowded(self) -> bool:
        """Whether sessions should not be opened until the next `take`."""
        return self._size > _CROWDED_TOKENS

    @property
    def num_closing(self) -> int:
        """Sessions that have their places until the next `take`: in a message opens come first."""
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
        self._told[session.id] = len(session.committed), session.num_draft_tokens
        source_words = 0 if constraint is None else len(constraint.source) // 4
        advised = len(advice.token_ids) + sum(map(len, advice.references))
        self._grow(len(session.committed) + source_words + advised)

    def commit(self, session: Session, step_us: int) -> None:
        """The session has committed something. Held back while no draft is wanted, or was."""
        length, k = self._told[session.id]
        if k or session.num_draft_tokens or len(session.committed) - length >= HELD_TOKENS:
            self._batch.step_us = step_us
            self._tell(session, length)

    def _tell(self, session: Session, base_len: int) -> None:
        """Send all that the session has committed since `base_len`, which was told last."""
        tokens, k = session.committed[base_len:], session.num_draft_tokens
        self._batch.commits.add(
            session=session.id,
            epoch=session.epoch,
            base_len=base_len,
            tokens=tokens,
            num_draft_tokens=k,
        )
        self._told[session.id] = base_len + len(tokens), k
        self._grow(len(tokens))

    def features(self, session: Session, rows: FeatureRows) -> None:
        """The target's states at positions of a session, in order."""
        if rows.of_prompt or self._num_behind[session.id]:
            self._behind.append(_Waiting(session.id, session.epoch, rows))
            self._num_behind[session.id] += 1
            self._wake.set()
        else:
            self._features.append(SentRows(session.id, session.epoch, rows.start, rows.rows))
            self._feature_bytes[rows.window] += len(rows.rows)
            self._grow(0)

    def close(self, session: Session) -> None:
        length, k = self._told[session.id]
        if not k and length < len(session.committed):  # what was held back may be worth learning
            self._tell(session, length)
        del self._told[session.id]
        self._batch.closes.add(session=session.id, epoch=session.epoch)
        self._grow(0)

    async def take(self) -> SessionMessage:
        """Wait until something was put, and takes all of it, but of prompts' states a part."""
        await self._wake.wait()
        # A session's Open goes before its rows.
        prompts_next = self._turn_of_prompts and not self._batch.opens
        prompts = bool(self._behind) and (prompts_next or not self._size)
        self._turn_of_prompts = not prompts
        message = self._take_prompts() if prompts else self._take_batch()
        message.batch.on_demand = self.on_demand
        if not self._size and not self._behind:
            self._wake.clear()
        return message

    def _take_batch(self) -> SessionMessage:
        message = SessionMessage(self._batch, self._features)
        self.made_room = self.crowded or self.num_closing > 0
        self.taken_feature_bytes, self._feature_bytes = self._feature_bytes, Counter()
        self._batch, self._features, self._size = draft_pb2.SessionBatch(), [], 0
        return message

    def _take_prompts(self) -> SessionMessage:
        sent: list[SentRows] = []
        self.made_room = False
        self.taken_feature_bytes = Counter()
        room = _PROMPT_BYTES
        while self._behind and room > 0:
            waiting = self._behind.popleft()
            part, left = waiting.divided(room)
            sent.append(part)
            room -= len(part.rows)
            self.taken_feature_bytes[waiting.rows.window] += len(part.rows)
            if left is not None:
                self._behind.appendleft(left)
            elif self._num_behind[waiting.session] == 1:
                del self._num_behind[waiting.session]
            else:
                self._num_behind[waiting.session] -= 1
        return SessionMessage(draft_pb2.SessionBatch(), sent)

    def _grow(self, tokens: int) -> None:
        self._size += 1 + tokens
        self._wake.set()
