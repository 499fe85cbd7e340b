"""The attached proposers and their sessions. Lives on the event loop; never blocks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from enum import IntEnum
from typing import Final

from outrider.draft_port import NO_DRAFTS, DraftingEngine, DraftOffer
from outrider.errors import OutriderError, ProposerRefusedError, UnavailableError
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.drafting.attached import AttachedProposer, check_hello, overflow_error
from scorer_service.drafting.outbox import Outbox
from scorer_service.drafting.projections import Projections, check_features
from scorer_service.metrics import ScorerMetrics
from scorer_service.sessions import Session, SessionListener

EXPLORE: Final = 64  # sessions, of which one goes to a proposer that was worse: that may change
AS_GOOD: Final = 0.8  # of the best worth: less may be the texts
ON_TRIAL: Final = 2  # sessions of unknown worth on one proposer, where others' is known
_log = logging.getLogger(__name__)


class ProposerRegistry:
    """Owns the attached proposers and gives each session that wants one a proposer.

    `DraftingEngine.set_drafting` hands each decision to the engine: a session without a proposer
    never waits.
    """

    def __init__(
        self,
        engine: DraftingEngine,
        served: ServedModel,
        limits: DraftLimits,
        metrics: ScorerMetrics,
        *,
        clock: Callable[[], float] | None = None,  # the event loop's
    ) -> None:
        self._engine = engine
        self.served = served
        self.limits = limits
        self._metrics = metrics
        self.projections = Projections(engine.features, limits)
        self._undrafted: dict[int, Session] = {}  # want a proposer and have none
        self._proposers: dict[str, AttachedProposer] = {}
        self.last_opened = 0
        """The largest id of a session that was opened on any proposer."""
        self._now = clock or asyncio.get_running_loop().time

    @property
    def proposers(self) -> tuple[AttachedProposer, ...]:
        return tuple(self._proposers.values())

    def attach(
        self, hello: draft_pb2.Hello, listener: SessionListener | None = None
    ) -> AttachedProposer:
        """Attach a proposer, in place of one of the same id, and open undrafted sessions on it.

        Without a `listener`, messages about its sessions wait in its outbox. Raises
        `ProposerRefusedError` or `InvalidRequestError`.
        """
        check_hello(hello, self.served)
        features = check_features(hello, self.served, self.limits)
        former = self._proposers.get(hello.proposer_id)
        if former is None and len(self._proposers) >= self.limits.max_proposers:
            raise ProposerRefusedError(
                f"{self.limits.max_proposers} proposers are attached already",
                reason="TOO_MANY_PROPOSERS",
            )
        if former is not None and hello.incarnation < former.incarnation:
            raise ProposerRefusedError(
                "a newer process is attached under this proposer_id: give each its own, and a "
                "larger incarnation at every start",
                reason="OLDER_INCARNATION",
            )
        proposer = AttachedProposer(hello, self.served, self.limits, features, listener)
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
        """Read the projection that Welcome asks for; then the proposer may have sessions."""
        assert proposer.features is not None
        await self.projections.receive(
            proposer.features,
            requests,
            lambda: [p.features.projection_sha256 for p in self.proposers if p.features],
        )
        proposer.ready = True
        self.assign_undrafted()

    def detach(self, proposer: AttachedProposer, error: OutriderError | None = None) -> None:
        """Detach a proposer, unless it is already, and reassign its sessions."""
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
        """Detach the proposers that do not read their messages."""
        for proposer in self.proposers:
            if proposer.outbox.overflowed:
                self.detach(proposer, overflow_error(self.limits))

    def on_goodbye(self, proposer: AttachedProposer) -> None:
        """Move the sessions of a proposer that drains."""
        proposer.draining = True
        self._move_sessions(proposer)

    def on_lost(self, proposer: AttachedProposer, lost: draft_pb2.Lost) -> None:
        """Reassign a session that its proposer evicted, a few times at most.

        A proposer that loses a session before its first draft has no room. Its number of sessions
        is limited to those it has, for a while.
        """
        session = proposer.sessions.get(lost.session)
        if session is None or session.epoch != lost.epoch:
            return
        if session.drafted:
            session.losses[proposer.id] += 1
        else:
            proposer.limit, proposer.probing = len(proposer.sessions) - 1, False
            proposer.full_until = self._now() + self.limits.full_s
        self.reassign(session)

    def on_first_block(self, proposer: AttachedProposer, session: Session) -> None:
        """Note that a proposer has room for a session; try two more if that was in doubt."""
        session.drafted = True
        if proposer.probing:
            self._offer(proposer, 2)

    def probe(self) -> None:
        """Try one more session on each proposer that had no room a while ago."""
        for proposer in self._proposers.values():
            limited = proposer.limit < proposer.max_sessions
            if limited and proposer.full_until <= self._now():
                proposer.full_until = self._now() + self.limits.full_s
                self._offer(proposer, 1)

    def _offer(self, proposer: AttachedProposer, places: int) -> None:
        """Allow `places` more sessions; lift the limit if fewer want a proposer."""
        proposer.limit = min(proposer.num_held + places, proposer.max_sessions)
        self.assign_undrafted()
        if proposer.num_held < proposer.limit:
            proposer.limit = proposer.max_sessions
        proposer.probing = proposer.limit < proposer.max_sessions

    def on_set_aside(self, session: Session) -> None:
        """Prefer others that are not worse to a proposer that the engine no longer waits for.

        The session moves only to a proposer that keeps up. Otherwise it stays, since blocks that
        come in time are still of use.
        """
        if session.proposer is None:
            return
        now = self._now()
        session.in_vain = True
        session.proposer.set_aside_until = now + self.limits.set_aside_s
        other = self._pick(session)
        if other is not None and other.set_aside_until <= now:
            self.reassign(session)

    @property
    def num_undrafted(self) -> int:
        """Number of sessions that want a proposer and have none."""
        return len(self._undrafted)

    # Sessions

    def _pick(self, session: Session) -> AttachedProposer | None:
        now = self._now()
        candidates = [
            proposer
            for proposer in self._proposers.values()
            if (proposer.has_room or proposer is session.proposer)
            and proposer.fits(session)
            and session.losses[proposer.id] <= self.limits.max_reopens
        ]
        ranks = _ranks(candidates, session)
        named = bool(session.request.speculation.methods)
        # What comes late counts in what a proposer is worth: others that are worse are no refuge.
        refuge = any(p.set_aside_until <= now and ranks[p.id] < _Rank.WORSE for p in candidates)
        return min(
            candidates,
            key=lambda p: (
                refuge and p.set_aside_until > now,
                session.losses[p.id],
                p.preference(session) if named else (),
                ranks[p.id],
                p.preference(session),
                p.load,
            ),
            default=None,
        )

    def assign(self, session: Session) -> None:
        """Give a session without a proposer one, or note that it wants one."""
        proposer = self._pick(session)
        if proposer is None:
            self._undrafted[session.id] = session
            return
        self._undrafted.pop(session.id, None)
        session.proposer = proposer
        session.epoch += 1
        session.drafted = session.in_vain = False
        k = proposer.draft_limit(session)
        # A draft model processes the prompt for its first draft, in vain where none is of use.
        session.num_draft_tokens = k if self._engine.drafting else 0
        proposer.sessions[session.id] = session
        self.last_opened = max(self.last_opened, session.id)
        # The engine drops drafts of a session without a proposer.
        with self._engine.between_same_steps():
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
            self._engine.set_drafting(session.id, offer)

    def assign_undrafted(self) -> None:
        """Give sessions without a proposer one, as far as there is room.

        The oldest come first, since they are the ones that run.
        """
        for _, session in sorted(self._undrafted.items()):
            if not any(proposer.has_room for proposer in self._proposers.values()):
                return
            self.assign(session)

    def leave(self, session: Session) -> None:
        """Forget a session that has ended, and give another its place."""
        self._undrafted.pop(session.id, None)
        if self._release(session):
            self.assign_undrafted()

    def on_taken(self, outbox: Outbox) -> None:
        """Give back the room of messages that were taken out of an outbox."""
        for window, size in outbox.taken_feature_bytes.items():
            self._engine.features.give_back(window, size)
        if outbox.made_room:
            self.assign_undrafted()

    def _release(self, session: Session) -> bool:
        """Take a session from its proposer, if it has one, without a word to the engine."""
        proposer, session.proposer = session.proposer, None
        if proposer is None:
            return False
        del proposer.sessions[session.id]
        proposer.outbox.close(session)
        return True

    def reassign(self, session: Session) -> None:
        """Move a session to another proposer or to a new epoch on the same one, or to none."""
        self._release(session)
        self.assign(session)
        if session.proposer is None:
            self._engine.set_drafting(session.id, NO_DRAFTS)

    def _move_sessions(self, proposer: AttachedProposer) -> None:
        for session in list(proposer.sessions.values()):
            self.reassign(session)

    def _count_proposers(self) -> None:
        attached = Counter((p.pool, p.method) for p in self._proposers.values())
        self._metrics.set_proposers(attached)


class _Rank(IntEnum):
    """By what drafts are measured to be worth."""

    TRY = 0
    GOOD = 1
    WORSE = 2


def _ranks(candidates: list[AttachedProposer], session: Session) -> dict[str, _Rank]:
    """Rank proposers by id. While the worth of none is known, all are good."""
    worth = {p.id: p.worth(session) for p in candidates}
    best = max([each for each in worth.values() if each is not None], default=None)
    ranks = {}
    for proposer in candidates:
        its = worth[proposer.id]
        if best is None or (its is not None and its >= AS_GOOD * best):
            ranks[proposer.id] = _Rank.GOOD
        else:
            alike = sum([each.sampled is session.sampled for each in proposer.sessions.values()])
            on_trial = its is None and alike < ON_TRIAL
            ranks[proposer.id] = _Rank.TRY if on_trial else _Rank.WORSE
    worse = [proposer_id for proposer_id, rank in ranks.items() if rank is _Rank.WORSE]
    if worse and session.id % EXPLORE == 0:
        ranks[worse[session.id // EXPLORE % len(worse)]] = _Rank.TRY
    return ranks
