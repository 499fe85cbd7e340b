"""The event loop's side of a proposer within this process."""

from __future__ import annotations

import asyncio

from outrider.draft_port import ColocatingEngine
from outrider.drafting.proposer import SessionStart
from outrider.errors import ConfigError, InternalError, OutriderError
from outrider.features import FeatureRows
from outrider.rpc.feature_codec import features_from_proto
from outrider.v1 import draft_pb2
from scorer_service.config import ServedModel
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.drafting.in_process import InProcessProposer
from scorer_service.drafting.in_process_flags import FLAG
from scorer_service.drafting.registry import ProposerRegistry
from scorer_service.sessions import Session


def attach(
    registry: ProposerRegistry,
    engine: ColocatingEngine,
    proposer: InProcessProposer,
    served: ServedModel,
) -> None:
    """Attach the proposer to the registry. Raises `ConfigError` if it does not fit."""
    hello = proposer.hello(served)
    if hello.HasField("features"):
        registry.projections.note(features_from_proto(hello.features))
    link = _Link(registry, engine, proposer)
    try:
        link.attached = registry.attach(hello, link)
    except OutriderError as error:
        raise ConfigError(f"{FLAG}: {error.message}") from error
    proposer.listen(link)


class _Link:
    """Implements `SessionListener` and `DraftListener`, by calls on the other's thread.

    The proposer has commits and hidden states on the engine's thread before the event loop does.
    """

    overflowed = crowded = False
    num_closing = 0
    attached: AttachedProposer

    def __init__(
        self, registry: ProposerRegistry, engine: ColocatingEngine, proposer: InProcessProposer
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._registry = registry
        self._engine = engine
        self._proposer = proposer

    # On the event loop

    def open(self, session: Session) -> None:
        speculation = session.request.speculation
        start = SessionStart(
            prefix=(),
            sampling=session.request.sampling,
            num_draft_tokens=session.num_draft_tokens,
            max_len=session.max_len,
            methods=speculation.methods,
            advice=speculation.advice,
            constraint=session.request.constraint,
            rule=speculation.verification.rule,
            tenant=session.request.tenant,
        )
        session_id, epoch, given = session.id, session.epoch, session.num_given_tokens
        self._engine.run_between_steps(
            lambda engine: self._proposer.open(engine, session_id, epoch, start, given), session_id
        )

    def commit(self, session: Session, step_us: int) -> None:
        pass

    def features(self, rows: FeatureRows) -> None:
        """Give back rows of a session that the proposer has lost meanwhile."""
        self._engine.features.give_back(rows.window, len(rows.rows))

    def close(self, session: Session) -> None:
        session_id = session.id
        self._engine.run_between_steps(lambda _: self._proposer.close(session_id))

    # On the engine's thread

    def first_draft(self, session_id: int, epoch: int) -> None:
        self._loop.call_soon_threadsafe(self._first_draft, session_id, epoch)

    def lost(self, session_id: int, epoch: int) -> None:
        lost = draft_pb2.Lost(session=session_id, epoch=epoch)
        self._loop.call_soon_threadsafe(self._registry.on_lost, self.attached, lost)

    def failed(self) -> None:
        error = InternalError("drafting failed several times; the log has the details")
        self._loop.call_soon_threadsafe(self._registry.detach, self.attached, error)

    def _first_draft(self, session_id: int, epoch: int) -> None:
        session = self.attached.sessions.get(session_id)
        if session is not None and session.epoch == epoch:
            self._registry.on_first_block(self.attached, session)
