"""Maps the sessions of scorers to those of the drafting method, and back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace

from outrider.drafting.draft_queue import DraftQueue
from outrider.drafting.proposer import Proposer, SessionKey, SessionStart
from outrider.errors import InvalidRequestError
from outrider.params import VerificationRule
from outrider.rpc import codec
from outrider.rpc.telemetry import Telemetry, extract
from outrider.v1 import draft_pb2
from proposer_service.metrics import ProposerMetrics
from proposer_service.pace import PaceMeter

_log = logging.getLogger(__name__)

LinkId = int
"""One stream. A redialled scorer is another link."""


@dataclass(slots=True)
class Route:
    """One epoch of one session of one scorer."""

    key: SessionKey
    link: LinkId
    session: int
    epoch: int
    span: trace.Span | None
    rounds: int = 0


class Routes:
    """Applies SessionBatches to the method and drops stale messages. Used on the drafting thread.

    Each Open gets a new key, so sessions of several scorers, and epochs of one session, are never
    taken for one another.
    """

    def __init__(self, proposer: Proposer, metrics: ProposerMetrics, telemetry: Telemetry) -> None:
        self._proposer = proposer
        self._metrics = metrics
        self._telemetry = telemetry
        self._by_name: dict[tuple[LinkId, int], Route] = {}
        self._by_key: dict[SessionKey, Route] = {}
        self.queue = DraftQueue(proposer)
        self.pace = PaceMeter()
        self.drafted: dict[SessionKey, None] = {}
        """Sessions that have a draft, past which nothing was drafted yet."""
        self._paced = proposer.traits.runs_ahead  # otherwise nobody asks for the pace

    def apply(self, link: LinkId, batch: draft_pb2.SessionBatch, arrived: float) -> None:
        """Apply opens, then features, commits and closes, as draft.proto says."""
        step_s = batch.step_us * 1e-6
        self.pace.step(step_s)
        for opened in batch.opens:
            self._open(link, opened)
        for features in batch.features:
            route = self._by_name.get((link, features.session))
            if route is not None and route.epoch == features.epoch:
                self.queue.features(route.key, features.start, features.rows)
        for commit in batch.commits:
            route = self._by_name.get((link, commit.session))
            if route is not None and route.epoch == commit.epoch:
                key, tokens = route.key, commit.tokens[:]
                if self._paced:
                    # Only a draft can have brought more than one token.
                    self.pace.committed(key, arrived, step_s, verified=len(tokens) > 1)
                self.drafted.pop(key, None)
                self.queue.commit(key, commit.base_len, tokens, commit.num_draft_tokens)
        for closed in batch.closes:
            route = self._by_name.get((link, closed.session))
            if route is not None and route.epoch == closed.epoch:
                self._drop(route)
                self.queue.close(route.key)

    def answered(self, key: SessionKey) -> None:
        """Note that the scorer has the draft of a session."""
        self.queue.answered(key)
        route = self._by_key[key]
        self.drafted[key] = None
        route.rounds += 1

    def handed_over(self, key: SessionKey, now: float) -> None:
        """Note that a new draft of a session is on its way."""
        self.answered(key)
        if self._paced:
            self.pace.handed_over(key, now)

    def handed_ahead(self, keys: Sequence[SessionKey], now: float) -> None:
        """Note that branches of sessions are on their way; without any, none will follow."""
        if not keys:
            self.drafted.clear()
            self.pace.no_branches()
        for key in keys:
            self.pace.handed_ahead(key, now)

    def route(self, key: SessionKey) -> Route:
        return self._by_key[key]

    def lost(self, key: SessionKey) -> Route | None:
        """Drop a session that the method has forgotten; None if the scorer closed it before."""
        route = self._by_key.get(key)
        if route is not None:
            self._drop(route)
            self.queue.drop(key)
        return route

    def drop_link(self, link: LinkId) -> None:
        for route in [route for route in self._by_name.values() if route.link == link]:
            self._drop(route)
            self.queue.forget(route.key)

    def _open(self, link: LinkId, opened: draft_pb2.Open) -> None:
        former = self._by_name.get((link, opened.session))
        if former is not None:
            if former.epoch >= opened.epoch:
                return
            self._drop(former)
            self.queue.forget(former.key)
        try:
            start = _start(opened)
        except InvalidRequestError as error:
            self._metrics.malformed.inc()
            _log.warning("dropped an Open of session %d: %s", opened.session, error.message)
            return
        key, span = self.queue.new_key(), self._span(opened.traceparent)
        route = Route(key, link, opened.session, opened.epoch, span)
        self._by_name[link, opened.session] = self._by_key[key] = route
        self.queue.open(key, start)

    def _drop(self, route: Route) -> None:
        del self._by_name[route.link, route.session]
        del self._by_key[route.key]
        self.drafted.pop(route.key, None)
        self.pace.forget(route.key)
        if route.span is not None:
            route.span.set_attribute("outrider.rounds", route.rounds)
            route.span.end()

    def _span(self, traceparent: str) -> trace.Span | None:
        if not traceparent:
            return None
        context = extract((("traceparent", traceparent),))
        method = self._proposer.traits.method
        return self._telemetry.tracer.start_span(
            "proposer.session", context, attributes={"outrider.method": method}
        )


def _start(opened: draft_pb2.Open) -> SessionStart:
    """Raise `InvalidRequestError` for a value out of range."""
    return SessionStart(
        prefix=tuple(opened.prefix),
        sampling=codec.sampling_from_proto(opened.sampling, seed=0),
        num_draft_tokens=opened.num_draft_tokens,
        max_len=opened.max_len,
        methods=tuple(opened.methods),
        advice=codec.advice_from_proto(opened.advice),
        constraint=codec.constraint_from_proto(opened.constraint),
        # Under a rule of a newer scorer drafts of any kind are welcome.
        rule=codec.RULE_FROM_PROTO.get(opened.verification_rule, VerificationRule.COUPLED),
        tenant=opened.tenant,
        num_output_tokens=opened.num_output_tokens,
    )
