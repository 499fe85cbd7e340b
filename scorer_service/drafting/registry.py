"""The attached proposers, and who drafts for whom. Lives on the event loop; never blocks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable

from outrider.draft_port import NO_DRAFTS, DraftingEngine, DraftOffer
from outrider.errors import OutriderError, ProposerRefusedError, UnavailableError
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.drafting.attached import AttachedProposer, check_hello, overflow_error
from scorer_service.drafting.outbox import Recipient
from scorer_service.drafting.projections import Projections, check_features
from scorer_service.metrics import ScorerMetrics
from scorer_service.sessions import Session

_MAX_POOLS = 256
_log = logging.getLogger(__name__)


class ProposerRegistry:
    """Owns the attached proposers and gives each session that wants one a proposer.

    `DraftingEngine.set_drafting` hands each decision to the engine: a session without a proposer
    never waits.
    """

    def __init__(
        self,
        worker: DraftingEngine,
        served: ServedModel,
        limits: DraftLimits,
        metrics: ScorerMetrics,
        *,
        clock: Callable[[], float] | None = None,  # the event loop's
    ) -> None:
        self._worker = worker
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self.projections = Projections(worker.features, limits)
        self._undrafted: dict[int, Session] = {}  # want a proposer and have none
        self._proposers: dict[str, AttachedProposer] = {}
        self._pools: set[tuple[str, str]] = set()  # pool and method of all that ever attached
        self._now = clock or asyncio.get_running_loop().time

    @property
    def proposers(self) -> tuple[AttachedProposer, ...]:
        return tuple(self._proposers.values())

    def attach(self, hello: draft_pb2.Hello, told: Recipient | None = None) -> AttachedProposer:
        """Take on a proposer; one of the same id that is still attached is replaced.

        It is `told` of its sessions, or by messages that wait in its outbox. Running sessions
        without a proposer are opened on it. Raises `ProposerRefusedError` or
        `InvalidRequestError`.
        """
        check_hello(hello, self._served)
        features = check_features(hello, self._served.features, self._limits)
        former = self._proposers.get(hello.proposer_id)
        if former is None and len(self._proposers) >= self._limits.max_proposers:
            raise ProposerRefusedError(
                f"{self._limits.max_proposers} proposers are attached already",
                reason="TOO_MANY_PROPOSERS",
            )
        proposer = AttachedProposer(hello, self._served, self._limits, features, told)
        proposer.ready = not self.projections.lacks(features)
        if former is not None:
            self.detach(former, UnavailableError("this proposer_id dialled anew"))
        self._proposers[proposer.id] = proposer
        self._metrics.attached(proposer.id, proposer.pool)
        self._count_proposers()
        _log.info("proposer %s attached: %s %s", proposer.id, proposer.method, proposer.model)
        self.assign_undrafted()
        return proposer

    async def complete(
        self, proposer: AttachedProposer, requests: AsyncIterator[draft_pb2.DraftRequest]
    ) -> None:
        """Read the projection that the proposer was asked for; then it may have sessions."""
        assert proposer.features is not None
        await self.projections.receive(
            proposer.features,
            requests,
            lambda: [p.features.projection_sha256 for p in self.proposers if p.features],
        )
        proposer.ready = True
        self.assign_undrafted()

    def detach(self, proposer: AttachedProposer, error: OutriderError | None = None) -> None:
        """Lets go of a proposer; its sessions go to others or on without. No-op the second time."""
        if proposer.detached.done():
            return
        proposer.detached.set_result(error)
        del self._proposers[proposer.id]
        self._count_proposers()
        why = f": {error.message}" if error is not None else ""
        _log.info("proposer %s detached%s", proposer.id, why)
        self._move_sessions(proposer)

    def detach_all(self, error: OutriderError) -> None:
        for proposer in self.proposers:
            self.detach(proposer, error)

    def detach_slow(self) -> None:
        """Lets go of the proposers that do not read what they are sent."""
        for proposer in self.proposers:
            if proposer.outbox.overflowed:
                self.detach(proposer, overflow_error(self._limits))

    def tell_how(self, *, on_demand: bool) -> None:
        """Whether proposers that can run ahead are not to, from their next message on."""
        for proposer in self._proposers.values():
            proposer.outbox.on_demand = on_demand

    def on_goodbye(self, proposer: AttachedProposer) -> None:
        """It drains: its sessions are closed on it at once and drafted for elsewhere."""
        proposer.draining = True
        self._move_sessions(proposer)

    def on_lost(self, proposer: AttachedProposer, lost: draft_pb2.Lost) -> None:
        """It evicted a session, which is opened anew, here or elsewhere, a few times at most; or it
        has no room: then it is given no more than it has, for a while.
        """
        session = proposer.sessions.get(lost.session)
        if session is None or session.epoch != lost.epoch:
            return
        if session.drafted:
            session.losses[proposer.id] += 1
        else:
            proposer.limit, proposer.probing = len(proposer.sessions) - 1, False
            proposer.full_until = self._now() + self._limits.full_s
        self.reassign(session)

    def on_first_block(self, proposer: AttachedProposer, session: Session) -> None:
        """It has room for a session; if that was in doubt, perhaps for two more."""
        session.drafted = True
        if proposer.probing:
            self._offer(proposer, 2)

    def probe(self) -> None:
        """Try one session more on each proposer that had no room a while ago."""
        for proposer in self._proposers.values():
            limited = proposer.limit < proposer.max_sessions
            if limited and proposer.full_until <= self._now():
                proposer.full_until = self._now() + self._limits.full_s
                self._offer(proposer, 1)

    def _offer(self, proposer: AttachedProposer, places: int) -> None:
        """So many more sessions may be opened on it; if fewer want that, any number may."""
        proposer.limit = min(proposer.num_held + places, proposer.max_sessions)
        self.assign_undrafted()
        if proposer.num_held < proposer.limit:
            proposer.limit = proposer.max_sessions
        proposer.probing = proposer.limit < proposer.max_sessions

    def on_set_aside(self, session: Session) -> None:
        """The engine no longer waits for a session's proposer: one that keeps up takes over.

        Without such a one the session stays: blocks that come in time are still of use, and
        another that is slow itself would only have its prompt to process, too.
        """
        if session.proposer is None:
            return
        now = self._now()
        session.proposer.set_aside_until = now + self._limits.set_aside_s
        other = self._pick(session)
        if other is not None and other.set_aside_until <= now:
            self.reassign(session)

    @property
    def num_undrafted(self) -> int:
        """Sessions that want a proposer and have none."""
        return len(self._undrafted)

    # Who drafts for whom

    def _pick(self, session: Session) -> AttachedProposer | None:
        now = self._now()
        candidates = [
            proposer
            for proposer in self._proposers.values()
            if proposer.has_room
            and proposer.fits(session)
            and session.losses[proposer.id] <= self._limits.max_reopens
        ]
        return min(
            candidates,
            key=lambda p: (
                p.set_aside_until > now,
                session.losses[p.id],
                p.preference(session),
                p.load,
            ),
            default=None,
        )

    def assign(self, session: Session) -> None:
        """Give a session without a proposer one, or notes that it wants one."""
        proposer = self._pick(session)
        if proposer is None:
            self._undrafted[session.id] = session
            return
        self._undrafted.pop(session.id, None)
        session.proposer = proposer
        session.epoch += 1
        session.drafted = False
        k = proposer.draft_limit(session)
        # A draft model processes the prompt for its first draft: not where none is of use.
        session.num_draft_tokens = k if self._worker.drafting else 0
        proposer.sessions[session.id] = session
        with self._worker.between_same_steps():  # else a draft could come before it is welcome
            proposer.outbox.open(session)
            offer = DraftOffer(
                proposer.id,
                k,
                runs_ahead=proposer.runs_ahead,
                own_device=proposer.own_device,
                colocated=proposer.colocated,
                requested=session.num_draft_tokens > 0,
                features=proposer.feature_order(session),
            )
            self._worker.set_drafting(session.id, offer)

    def assign_undrafted(self) -> None:
        """Give the sessions without a proposer one, as far as there is room.

        The oldest first, whenever they lost theirs: they are those that run.
        """
        for _, session in sorted(self._undrafted.items()):
            if not any(proposer.has_room for proposer in self._proposers.values()):
                return
            self.assign(session)

    def leave(self, session: Session) -> None:
        """The session has ended; another may have its place, once the proposer is told."""
        self._undrafted.pop(session.id, None)
        if session.proposer is not None:
            self._release(session.proposer, session)
            self.assign_undrafted()

    def _release(self, proposer: AttachedProposer, session: Session) -> None:
        """Take a session from its proposer. The engine is not told."""
        session.proposer = None
        del proposer.sessions[session.id]
        proposer.outbox.close(session)

    def reassign(self, session: Session) -> None:
        """Move a session to another proposer or to a new epoch on the same one, or to none."""
        if session.proposer is not None:
            self._release(session.proposer, session)
        self.assign(session)
        if session.proposer is None:
            self._worker.set_drafting(session.id, NO_DRAFTS)

    def _move_sessions(self, proposer: AttachedProposer) -> None:
        for session in list(proposer.sessions.values()):
            self.reassign(session)

    def _count_proposers(self) -> None:
        attached = Counter((p.pool, p.method) for p in self._proposers.values())
        for pool_and_method in attached:
            # A proposer may call its pool what it likes, but not fill the memory with names.
            if len(self._pools) < _MAX_POOLS:
                self._pools.add(pool_and_method)
        for pool, method in self._pools:
            self._metrics.set_proposers(attached[pool, method], pool, method)
