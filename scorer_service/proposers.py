"""An attached proposer: who it said it is, its sessions, and what waits to be sent to it."""

from __future__ import annotations

import asyncio
from typing import Final

from outrider.errors import CapacityError, InvalidRequestError, OutriderError, ProposerRefusedError
from outrider.features import FeatureOrder, FeatureRows, FeatureSpec, FeatureWindow
from outrider.methods import METHODS
from outrider.params import MAX_SPECULATIVE_TOKENS
from outrider.rpc import codec
from outrider.rpc.versions import agreed_version
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.sessions import Session

_CROWDED_TOKENS: Final = 2**18
"""Waiting in an outbox: other sessions are opened later, or all of them together would be more
than a message holds, and more than may wait."""

HELD_TOKENS: Final = 64
"""That a session without drafts may commit before its proposer is told: it has few to catch up with
when drafts are wanted again, and is not woken for every token meanwhile."""

_MAX_NAME_CHARS: Final = 1024

# They need neither the vocabulary nor the tokenizer.
_COPYING_METHODS = frozenset({"deterministic", "ngram", "suffix"})
# They draft no more than they are sure of.
_SELF_LIMITING = frozenset({"deterministic", "suffix"})


class Outbox:
    """Messages for one proposer, merged while it is slow; bounded.

    Whatever was put since the last `take` travels as one message: one per engine step if the
    proposer keeps up. Of a session for which nothing is drafted, some is held back.
    """

    def __init__(self, max_tokens: int, methods: tuple[str, ...]) -> None:
        self._methods = methods
        self._told: dict[int, tuple[int, int]] = {}
        """By open session: the committed length and the number of draft tokens told last."""
        self._max_tokens = max_tokens
        self._message = draft_pb2.DraftResponse()
        self._batch = self._message.sessions  # filled in place: features are megabytes
        self._size = 0
        self.was_crowded = False
        """When the last batch was taken: others may have waited for that."""
        self._feature_bytes = 0
        self.taken_feature_bytes = 0
        """In the last batch that was taken."""
        self._wake = asyncio.Event()

    @property
    def overflowed(self) -> bool:
        return self._size > self._max_tokens

    @property
    def crowded(self) -> bool:
        """Whether sessions should not be opened until the next `take`."""
        return self._size > _CROWDED_TOKENS

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
            self._tell(session)

    def _tell(self, session: Session) -> None:
        """Sends all that the session has committed since this was last told."""
        base_len, _ = self._told[session.id]
        tokens = session.committed[base_len:]
        self._batch.commits.add(
            session=session.id,
            epoch=session.epoch,
            base_len=base_len,
            tokens=tokens,
            num_draft_tokens=session.num_draft_tokens,
        )
        self._told[session.id] = len(session.committed), session.num_draft_tokens
        self._grow(len(tokens))

    def features(self, session: Session, rows: FeatureRows) -> None:
        """The target's states at positions of a session, in order."""
        self._batch.features.add(
            session=session.id, epoch=session.epoch, start=rows.start, rows=rows.rows
        )
        self._feature_bytes += len(rows.rows)
        self._grow(0)

    def close(self, session: Session) -> None:
        length, k = self._told[session.id]
        if not k and length < len(session.committed):  # what was held back may be worth learning
            self._tell(session)
        del self._told[session.id]
        self._batch.closes.add(session=session.id, epoch=session.epoch)
        self._grow(0)

    async def take(self) -> draft_pb2.DraftResponse:
        """Waits until something was put, and takes all of it."""
        await self._wake.wait()
        self._wake.clear()
        self.was_crowded = self.crowded
        self.taken_feature_bytes, self._feature_bytes = self._feature_bytes, 0
        message, self._message, self._size = self._message, draft_pb2.DraftResponse(), 0
        self._batch = self._message.sessions
        return message

    def _grow(self, tokens: int) -> None:
        self._size += 1 + tokens
        self._wake.set()


class AttachedProposer:
    """Only the hub writes it, on the event loop."""

    def __init__(
        self,
        hello: draft_pb2.Hello,
        served: ServedModel,
        limits: DraftLimits,
        features: FeatureSpec | None = None,
    ) -> None:
        self.id: str = hello.proposer_id
        self.incarnation: int = hello.incarnation
        self.method: str = hello.method
        self.pool: str = hello.pool or "default"
        self.methods: tuple[str, ...] = tuple(hello.methods) or (hello.method,)
        self.model: str = hello.model
        self.max_sessions: int = hello.max_sessions
        self.max_draft_tokens: int = hello.max_draft_tokens
        self.runs_ahead: bool = hello.runs_ahead
        self.max_model_len: int = hello.max_model_len or served.max_model_len
        self.sessions: dict[int, Session] = {}
        self.outbox = Outbox(limits.max_backlog_tokens, self.methods)
        self.features = features
        self.window = FeatureWindow()
        self.ready = True  # False until the scorer has the projection that it needs
        self.draining = False  # said Goodbye
        self.set_aside_until = 0.0  # loop time; until then others are preferred
        self.bad_blocks = 0
        self.detached: asyncio.Future[OutriderError | None] = (
            asyncio.get_running_loop().create_future()
        )
        """Done once the hub has let go of it; the error that the stream should end with."""

    @property
    def load(self) -> float:
        return len(self.sessions) / self.max_sessions

    @property
    def has_room(self) -> bool:
        full = len(self.sessions) >= self.max_sessions or self.outbox.crowded
        return self.ready and not full and not self.draining

    def feature_order(self, session: Session) -> FeatureOrder | None:
        """What is to be sent of the target's states, from its latest Open on."""
        if self.features is None:
            return None
        return FeatureOrder(session.epoch, self.features, self.window)

    def methods_for(self, session: Session) -> tuple[str, ...]:
        """Its methods that may draft for the session, the session's preferred one first."""
        speculation = session.request.speculation
        useless = () if speculation.advice.token_ids else ("deterministic",)
        return tuple(
            name
            for name in speculation.methods or METHODS
            if name in self.methods and name not in useless
        )

    def fits(self, session: Session) -> bool:
        """Whether it may draft for the session, room aside."""
        return bool(self.methods_for(session)) and len(session.committed) < self.max_model_len

    def preference(self, session: Session) -> tuple[int, int]:
        """The smaller, the better it suits a session that it fits."""
        methods = self.methods_for(session)
        order = session.request.speculation.methods or METHODS
        return order.index(methods[0]), -len(methods)

    def draft_limit(self, session: Session) -> int:
        """Draft tokens per round at most.

        Where the request names none, the scorer's default bounds methods that draft what they are
        asked for. Those that draft as much as they are sure of are bounded by what they can do:
        long drafts are what they are for, and the policy takes less where that is faster.
        """
        limit = session.num_speculative_tokens
        asked = session.request.speculation.num_speculative_tokens
        if asked is None and limit and not _SELF_LIMITING.isdisjoint(self.methods_for(session)):
            limit = MAX_SPECULATIVE_TOKENS
        return min(limit, self.max_draft_tokens)


def check_hello(hello: draft_pb2.Hello, served: ServedModel) -> None:
    """Raises `ProposerRefusedError` with the reasons of draft.proto, or `InvalidRequestError`."""
    agreed_version(hello.protocol_version)
    for name in ("proposer_id", "max_sessions", "max_draft_tokens"):
        if not getattr(hello, name):
            raise InvalidRequestError(f"Hello.{name} must be set", param=name)
    for name in ("proposer_id", "model", "pool"):  # they are kept, sent on and made labels of
        if len(getattr(hello, name)) > _MAX_NAME_CHARS:
            raise InvalidRequestError(
                f"Hello.{name} must be at most {_MAX_NAME_CHARS} characters long", param=name
            )
    if len(hello.methods) > len(METHODS):  # before going through them, which takes time
        raise InvalidRequestError(f"Hello.methods must be at most {len(METHODS)}", param="methods")
    methods = tuple(hello.methods) or (hello.method,)
    if len(methods) > len(set(methods)):
        raise InvalidRequestError(
            "Hello.methods must be different from each other", param="methods"
        )
    for method in (hello.method, *methods):
        if method not in METHODS:
            raise ProposerRefusedError(
                f"unknown method {method!r}; this scorer knows {', '.join(METHODS)}",
                reason="UNKNOWN_METHOD",
            )
    if hello.method != methods[0]:
        raise InvalidRequestError("Hello.method must be the first of methods", param="method")
    copies = _COPYING_METHODS.issuperset(methods)
    if hello.vocab_size != served.vocab_size and not (copies and hello.vocab_size == 0):
        raise ProposerRefusedError(
            f"the draft's vocabulary has {hello.vocab_size} tokens, the target's "
            f"{served.vocab_size}: use a draft with the target's tokenizer",
            reason="VOCAB_MISMATCH",
        )
    theirs, ours = hello.tokenizer_hash, served.tokenizer_hash
    if ours and theirs != ours and not (copies and not theirs):
        raise ProposerRefusedError(
            f"the draft's tokenizer ({theirs[:12] or 'none'}) is not the target's ({ours[:12]}): "
            "the same id would mean different text",
            reason="TOKENIZER_MISMATCH",
        )


def overflow_error(limits: DraftLimits) -> CapacityError:
    """What a proposer that does not read is told."""
    return CapacityError(
        f"more than {limits.max_backlog_tokens} tokens wait to be read: the proposer is too slow",
        retry_after_s=limits.set_aside_s,
    )
