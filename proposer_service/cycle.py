"""One drafting cycle: apply messages, draft for sessions, hand over blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.draft_tree import DraftTree
from outrider.drafting.proposer import NO_PACE, DraftRound, Pace, Proposer, SessionKey
from outrider.rpc import codec
from outrider.rpc.channel import MAX_MESSAGE_BYTES
from outrider.rpc.telemetry import Telemetry
from outrider.v1 import draft_pb2
from proposer_service.connection import Connection
from proposer_service.metrics import ProposerMetrics
from proposer_service.routes import LinkId, Route, Routes

Send = Callable[[Sequence[draft_pb2.DraftRequest]], None]
Outgoing = dict[LinkId, list[draft_pb2.DraftRequest]]

_MESSAGE_BYTES: Final = MAX_MESSAGE_BYTES // 4
"""A message of this size gets no further block. The last block of a message may be a megabyte."""
_BLOCK_BYTES: Final = (
    256  # more than a block's head takes, so that a message has 2^14 blocks at most
)
_NODE_BYTES: Final = 26  # at most: a token, its parent, and the head of its distribution
_PROB_BYTES: Final = 9  # at most: a token of a distribution


@dataclass(frozen=True, slots=True)
class Attach:
    """A stream came up. `send` is called on the drafting thread."""

    link: LinkId
    send: Send
    max_block_tokens: int
    connection: Connection | None = None
    """The source of its messages; None: the event loop puts them."""


@dataclass(frozen=True, slots=True)
class Detach:
    """A stream went down."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Batch:
    """A message of a scorer."""

    link: LinkId
    message: draft_pb2.SessionBatch
    arrived: float  # perf_counter
    feature_bytes: int = 0  # of a message that waits in the inbox


@dataclass(frozen=True, slots=True)
class SendMessage:
    """A message to a scorer that is about no session."""

    link: LinkId
    message: draft_pb2.DraftRequest


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of the thread."""


Item = Attach | Detach | Batch | SendMessage | Stop


class Cycle:
    """The drafting thread's sessions, and their scorers."""

    def __init__(
        self,
        proposer: Proposer,
        metrics: ProposerMetrics,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._proposer = proposer
        self._metrics = metrics
        self._clock = clock
        self._routes = Routes(proposer, metrics, telemetry)
        self._links: dict[LinkId, Attach] = {}
        self._sessions_seen = 0
        self._started = 0.0  # of the current cycle

    @property
    def has_work(self) -> bool:
        return bool(self._routes.queue.wanting)

    def apply(self, items: Sequence[Item]) -> bool:
        """Begin a cycle by applying messages in order; False if one says to stop."""
        self._started = self._clock()
        for item in items:
            if isinstance(item, Batch):
                if item.link in self._links:
                    self._routes.apply(item.link, item.message, item.arrived)
            elif isinstance(item, Attach):
                self._links[item.link] = item
            elif isinstance(item, Detach):
                del self._links[item.link]
                self._routes.drop_link(item.link)
            elif isinstance(item, SendMessage):
                if item.link in self._links:
                    self._links[item.link].send([item.message])
            else:
                return False
        return True

    def draft(self) -> None:
        """Draft for every session that wants it, and hand the blocks over."""
        started = self._clock()
        round_ = self._proposer.draft([*self._routes.queue.wanting], self._pace())
        self._send(round_)
        # Notes taken after the hand-over delay no draft.
        now = self._clock()
        self._note_host(round_, now - started)
        for key, _ in round_.drafts:
            self._routes.handed_over(key, now)
        for key in round_.at_hand:
            self._routes.answered(key)
        for key in round_.unfinished:
            self._routes.queue.unfinished(key)
        if round_.drafts or round_.unfinished:
            self._metrics.draft_tokens.inc(sum([len(tree.token_ids) for _, tree in round_.drafts]))
            self._metrics.cycle.observe(self._clock() - self._started)
            self._metrics.forward.observe(round_.forward_s)
            self._metrics.batch_size.observe(len(round_.drafts) + len(round_.unfinished))
        self._note_loops(round_)
        if self._sessions_seen != self._proposer.num_sessions:
            self._sessions_seen = self._proposer.num_sessions
            self._metrics.sessions.set(self._sessions_seen)

    def ahead(self) -> bool:
        """Draft past the drafts that were handed over; False if nothing is left to draft."""
        keys = list(self._routes.drafted)
        if not keys or not self._proposer.traits.runs_ahead:
            self._proposer.ahead((), NO_PACE)
            return False
        self._started = self._clock()
        round_ = self._proposer.ahead(keys, self._pace())
        self._send(round_)
        now = self._clock()
        self._note_host(round_, now - self._started)
        self._routes.handed_ahead([key for key, _ in round_.trees], now)
        if round_.trees:
            self._metrics.ahead.observe(self._clock() - self._started)
            self._metrics.branch_tokens.inc(sum([len(tree.token_ids) for _, tree in round_.trees]))
        self._note_loops(round_)
        return bool(round_.trees)

    def _note_host(self, round_: DraftRound, seconds: float) -> None:
        """Note what a round with branches took beside its loops."""
        if round_.trees and round_.loops:
            self._routes.pace.host(seconds - sum([run.seconds for run in round_.loops]))

    def _note_loops(self, round_: DraftRound) -> None:
        for run in round_.loops:
            self._metrics.loop(run)

    def _pace(self) -> Pace:
        return self._routes.pace.after(self._clock())

    def give_up(self) -> None:
        """Lose the sessions of a cycle that failed; scorers may open them again."""
        keys = [*self._routes.queue.wanting, *self._routes.drafted]
        outgoing: Outgoing = {}
        for key in keys:
            self._proposer.forget(key)
        self._lose(keys, outgoing)
        self._hand_over(outgoing)

    def close(self) -> None:
        """Drop all links."""
        for link in self._links:
            self._routes.drop_link(link)

    def _send(self, round_: DraftRound) -> None:
        """Hand over all drafts of a round, and say which sessions are lost."""
        draft_us = round((self._clock() - self._started) * 1e6)
        blocks = _Blocks(self._links, draft_us, round_.methods)
        for key, tree in (*round_.drafts, *round_.trees):
            blocks.add(self._routes.route(key), tree)
        self._lose(round_.lost, blocks.messages)
        self._hand_over(blocks.messages)

    def _lose(self, keys: Sequence[SessionKey], outgoing: Outgoing) -> None:
        for key in keys:
            self._metrics.lost.inc()
            route = self._routes.lost(key)
            if route is None:
                continue
            lost = draft_pb2.Lost(session=route.session, epoch=route.epoch)
            outgoing.setdefault(route.link, []).append(draft_pb2.DraftRequest(lost=lost))

    def _hand_over(self, outgoing: Outgoing) -> None:
        for link, messages in outgoing.items():
            self._links[link].send(messages)


class _Blocks:
    """Messages of blocks by link, nearly always one of a link.

    Blocks are made within their message, since protobuf would copy them into it.
    """

    def __init__(
        self, links: Mapping[LinkId, Attach], draft_us: int, methods: Mapping[SessionKey, int]
    ) -> None:
        self._links = links
        self._draft_us = draft_us
        self._methods = methods
        self.messages: Outgoing = {}
        self._add: dict[LinkId, Callable[..., draft_pb2.Block]] = {}  # to the last message
        self._room: dict[LinkId, int] = {}  # bytes that the last message has left

    def add(self, route: Route, tree: DraftTree) -> None:
        link = route.link
        if self._room.get(link, 0) <= 0:
            message = draft_pb2.DraftRequest()
            self.messages.setdefault(link, []).append(message)
            self._add[link] = message.blocks.blocks.add
            self._room[link] = _MESSAGE_BYTES
        if len(tree.token_ids) > (limit := self._links[link].max_block_tokens):
            tree = tree.at_most(limit)
        block = self._add[link](
            session=route.session,
            epoch=route.epoch,
            base_len=tree.base_len,
            token_ids=tree.token_ids,
            draft_us=self._draft_us,
        )
        size = _BLOCK_BYTES + _NODE_BYTES * len(tree.token_ids)
        # Most blocks lack these fields, and setting them to nothing takes time.
        if not tree.is_chain:
            block.parents.extend(tree.parents)
        if tree.probs:
            block.draft_probs.extend([codec.draft_probs_to_proto(probs) for probs in tree.probs])
            size += _PROB_BYTES * sum([len(probs.token_ids) for probs in tree.probs if probs])
        if tree.confidences:
            block.confidences = tree.confidences
        if self._methods:
            block.method_index = self._methods.get(route.key, 0)
        self._room[link] -= size
