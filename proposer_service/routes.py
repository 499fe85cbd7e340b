"""From a scorer's sessions to the method's, and back."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from opentelemetry import trace

from outrider.drafting.proposer import FeatureProposer, Proposer, SessionKey, SessionStart
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
    length: int = 0  # committed tokens, as far as the scorer told
    num_rows: int = 0  # positions whose features came


class Routes:
    """Applies SessionBatches to the method; drops what is stale. Used on the drafting thread.

    A session's key is new with every Open, so sessions of several scorers, and epochs of one,
    cannot be taken for one another.
    """

    def __init__(self, proposer: Proposer, metrics: ProposerMetrics, telemetry: Telemetry) -> None:
        self._proposer = proposer
        self._metrics = metrics
        self._telemetry = telemetry
        self._keys = itertools.count(1)
        self._by_name: dict[tuple[LinkId, int], Route] = {}
        self._by_key: dict[SessionKey, Route] = {}
        self.pace = PaceMeter()
        self.wanting: dict[SessionKey, None] = {}
        """Sessions that want a draft, in the order in which they asked."""
        self.drafted: dict[SessionKey, None] = {}
        """Sessions that have a draft, past which is to be guessed and nothing was yet."""
        self._on_demand: set[LinkId] = set()  # of whose sessions nothing is to be guessed past it
        self._starved: set[SessionKey] = set()  # want a draft, but features of theirs are to come
        needed = proposer.traits.features
        self._features = None if needed is None else cast("FeatureProposer", proposer)
        self._paced = proposer.traits.runs_ahead  # else nobody asks for the pace
        self._row_bytes = 0 if needed is None else needed.row_bytes

    def new_key(self) -> SessionKey:
        return next(self._keys)

    def apply(
        self,
        link: LinkId,
        batch: draft_pb2.SessionBatch,
        feature_rows: Sequence[bytes],
        arrived: float,
    ) -> None:
        """Open, then features, commits and closes, as draft.proto says.

        `feature_rows` are those of the batch's features.
        """
        step_s = batch.step_us * 1e-6
        self.pace.step(step_s)
        if batch.on_demand:
            self._on_demand.add(link)
        else:
            self._on_demand.discard(link)
        for opened in batch.opens:
            self._open(link, opened)
        for features, rows in zip(batch.features, feature_rows, strict=True):
            route = self._by_name.get((link, features.session))
            if route is not None and route.epoch == features.epoch:
                self._take_features(route, features.start, rows)
        for commit in batch.commits:
            route = self._by_name.get((link, commit.session))
            if route is not None and route.epoch == commit.epoch:
                key, base_len, wanted = route.key, commit.base_len, commit.num_draft_tokens
                tokens = commit.tokens[:]
                route.length = max(route.length, base_len + len(tokens))
                if self._paced:
                    # More than one: of tokens that only a draft can have brought.
                    self.pace.committed(key, arrived, step_s, verified=len(tokens) > 1)
                self._proposer.commit(key, base_len, tokens, wanted)
                self._want(key, wanted)
        for closed in batch.closes:
            route = self._by_name.get((link, closed.session))
            if route is not None and route.epoch == closed.epoch:
                self._proposer.close(route.key)
                self._forget(route)

    def answered(self, key: SessionKey) -> None:
        """The session of `key` has its draft now, or had it at hand."""
        del self.wanting[key]
        route = self._by_key[key]
        if route.link not in self._on_demand:
            self.drafted[key] = None
        route.rounds += 1

    def handed_over(self, key: SessionKey, now: float) -> None:
        """The session of `key` had no draft at hand: it is on its way now."""
        self.answered(key)
        if self._paced:
            self.pace.handed_over(key, now)

    def handed_ahead(self, keys: Sequence[SessionKey], now: float) -> None:
        """Branches for these sessions are on their way; none: nothing more is to be guessed."""
        if not keys:
            self.drafted.clear()
        for key in keys:
            self.pace.handed_ahead(key, now)

    def unfinished(self, key: SessionKey) -> None:
        """The session of `key` has no draft yet. If features are to come, it waits for them."""
        route = self._by_key.get(key)
        if self._features is None or route is None:
            return
        if route.num_rows < max(1, route.length - 1):
            del self.wanting[key]
            self._starved.add(key)

    def route(self, key: SessionKey) -> Route:
        return self._by_key[key]

    def lost(self, key: SessionKey) -> Route | None:
        """Forgets the session of `key`, which the method has forgotten already.

        None if the scorer closed it before the method came to say that it was lost.
        """
        route = self._by_key.get(key)
        if route is not None:
            self._forget(route)
        return route

    def drop_link(self, link: LinkId) -> None:
        for route in [route for route in self._by_name.values() if route.link == link]:
            self._proposer.forget(route.key)
            self._forget(route)
        self._on_demand.discard(link)

    def _open(self, link: LinkId, opened: draft_pb2.Open) -> None:
        former = self._by_name.get((link, opened.session))
        if former is not None:
            if former.epoch >= opened.epoch:
                return
            self._proposer.forget(former.key)
            self._forget(former)
        try:
            start = _start(opened)
        except InvalidRequestError as error:
            self._metrics.malformed.inc()
            _log.warning("dropped an Open of session %d: %s", opened.session, error.message)
            return
        route = Route(
            self.new_key(), link, opened.session, opened.epoch, self._span(opened.traceparent)
        )
        route.length = len(opened.prefix)
        self._by_name[link, opened.session] = route
        self._by_key[route.key] = route
        self._proposer.open(route.key, start)
        self._want(route.key, opened.num_draft_tokens)

    def _take_features(self, route: Route, start: int, rows: bytes) -> None:
        if self._features is None:
            return
        route.num_rows = max(route.num_rows, start + len(rows) // self._row_bytes)
        self._features.features(route.key, start, rows)
        if route.key in self._starved:
            self._starved.remove(route.key)
            self.wanting[route.key] = None

    def _want(self, key: SessionKey, num_draft_tokens: int) -> None:
        self.drafted.pop(key, None)
        self._starved.discard(key)
        if num_draft_tokens:
            self.wanting[key] = None
        else:
            self.wanting.pop(key, None)

    def _forget(self, route: Route) -> None:
        del self._by_name[route.link, route.session]
        del self._by_key[route.key]
        self.wanting.pop(route.key, None)
        self.drafted.pop(route.key, None)
        self._starved.discard(route.key)
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
        # A rule from a newer scorer: drafts of any kind are welcome under it.
        rule=codec.RULE_FROM_PROTO.get(opened.verification_rule, VerificationRule.COUPLED),
        tenant=opened.tenant,
        num_output_tokens=opened.num_output_tokens,
    )
