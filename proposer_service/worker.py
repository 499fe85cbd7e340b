"""The drafting thread: all of the method's work, one cycle after another.

A cycle takes every message that has come, applies them in order, and drafts once for all sessions
that want a draft. So a session that committed twice meanwhile is drafted for once, from its newest
state, and a slow method batches more instead of falling behind.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from outrider.draft_tree import DraftTree
from outrider.drafting.proposer import Proposer, ProposerTraits
from outrider.errors import CapacityError, UnavailableError
from outrider.rpc.telemetry import Telemetry
from outrider.types import SamplingParams, TokenIds
from outrider.v1 import draft_pb2
from proposer_service.metrics import ProposerMetrics
from proposer_service.routes import LinkId, Routes

_log = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_MAX_FAILURES: Final = 3  # drafting cycles that fail in a row until the process gives up

Deliver = Callable[[list[draft_pb2.DraftRequest]], None]


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """What the built method is; part of Hello."""

    traits: ProposerTraits
    tokenizer_hash: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """A guess for one prompt."""

    tree: DraftTree
    draft_us: int


@dataclass(frozen=True, slots=True)
class _Attach:
    link: LinkId
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class _Detach:
    link: LinkId


@dataclass(frozen=True, slots=True)
class _Batch:
    link: LinkId
    message: draft_pb2.SessionBatch


@dataclass(frozen=True, slots=True)
class _Propose:
    token_ids: TokenIds
    num_draft_tokens: int
    sampling: SamplingParams
    answer: Future[Proposal]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Item = _Attach | _Detach | _Batch | _Propose | _Stop


class DraftWorker:
    """Owns the method and its thread. Public methods are called from the event loop.

    `build` runs on the thread. `deliver` callbacks run on `loop`, once per cycle and link.
    """

    def __init__(
        self,
        build: Callable[[], tuple[Proposer, str]],
        loop: asyncio.AbstractEventLoop,
        metrics: ProposerMetrics,
        telemetry: Telemetry,
        *,
        max_queued: int = 4096,
    ) -> None:
        self._build = build
        self._loop = loop
        self._metrics = metrics
        self._telemetry = telemetry
        self._max_queued = max_queued
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)
        self._built: Future[MethodInfo] = Future()
        self.ended = asyncio.Event()
        """Set on the loop when the thread has ended, asked to or not."""
        self.num_sessions = 0

    async def start(self, timeout_s: float) -> MethodInfo:
        """Waits until the method is built; raises what building it raised."""
        self._thread.start()
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(self._built)

    async def stop(self, timeout_s: float) -> None:
        """Ends the thread after its current cycle; waits for it within the time."""
        if self._thread.ident is not None:
            self._queue.put(_Stop())
            await asyncio.to_thread(self._thread.join, timeout_s)

    def attach(self, link: LinkId, deliver: Deliver) -> None:
        """A stream came up. `link` is never used again after `detach`."""
        self._queue.put(_Attach(link, deliver))

    def detach(self, link: LinkId) -> None:
        """A stream went down: its sessions are forgotten."""
        self._queue.put(_Detach(link))

    def post(self, link: LinkId, message: draft_pb2.SessionBatch) -> bool:
        """Hands over what a scorer sent; False if the queue is full (try again later)."""
        if self._queue.qsize() >= self._max_queued:
            return False
        self._queue.put(_Batch(link, message))
        return True

    async def propose(
        self, token_ids: TokenIds, num_draft_tokens: int, sampling: SamplingParams
    ) -> Proposal:
        """Drafts after one prompt. Raises `CapacityError` or `UnavailableError`."""
        if self._queue.qsize() >= self._max_queued:
            raise CapacityError("the proposer's queue is full")
        answer: Future[Proposal] = Future()
        self._queue.put(_Propose(token_ids, num_draft_tokens, sampling, answer))
        return await asyncio.wrap_future(answer)

    # On the thread

    def _run(self) -> None:
        try:
            proposer, tokenizer_hash = self._build()
        except BaseException as error:  # handed to whoever waits in start()
            self._built.set_exception(error)
            return
        self._built.set_result(MethodInfo(proposer.traits, tokenizer_hash))
        cycle = _Cycle(proposer, self._loop, self._metrics, self._telemetry)
        failures = 0
        try:
            while failures < _MAX_FAILURES:
                if not cycle.apply(self._take(wait=not cycle.has_work)):
                    return
                try:
                    cycle.draft()
                    failures = 0
                except Exception:  # a fault of the device or a bug: the sessions are given up
                    _log.exception("drafting failed")
                    failures += 1
                    cycle.give_up()
                self.num_sessions = proposer.num_sessions
        finally:
            cycle.close()
            self._loop.call_soon_threadsafe(self.ended.set)

    def _take(self, *, wait: bool) -> list[_Item]:
        """All messages that have come; waits for one if asked, within a limit."""
        items: list[_Item] = []
        try:
            if wait:
                items.append(self._queue.get(timeout=_POLL_S))
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items


class _Cycle:
    """What the thread knows: sessions, who they belong to, and which want a draft."""

    def __init__(
        self,
        proposer: Proposer,
        loop: asyncio.AbstractEventLoop,
        metrics: ProposerMetrics,
        telemetry: Telemetry,
    ) -> None:
        self._proposer = proposer
        self._loop = loop
        self._metrics = metrics
        self._routes = Routes(proposer, metrics, telemetry)
        self._deliver: dict[LinkId, Deliver] = {}
        self._asked: dict[int, _Propose] = {}  # by session key
        self._sessions_seen = 0
        self._started = 0.0  # of the current cycle

    @property
    def has_work(self) -> bool:
        return bool(self._routes.wanting or self._asked)

    def apply(self, items: Sequence[_Item]) -> bool:
        """Begins a cycle: applies messages in order; False if one says to stop."""
        self._started = time.perf_counter()
        for item in items:
            if isinstance(item, _Batch):
                if item.link in self._deliver:
                    self._routes.apply(item.link, item.message)
            elif isinstance(item, _Attach):
                self._deliver[item.link] = item.deliver
            elif isinstance(item, _Detach):
                del self._deliver[item.link]
                self._routes.drop_link(item.link)
            elif isinstance(item, _Propose):
                self._open_proposal(item)
            else:
                return False
        return True

    def draft(self) -> None:
        """Drafts for every session that wants it and hands the blocks over, one message a link."""
        round_ = self._proposer.draft([*self._routes.wanting, *self._asked])
        draft_us = round((time.perf_counter() - self._started) * 1e6)
        outgoing: dict[LinkId, list[draft_pb2.DraftRequest]] = {}
        blocks: dict[LinkId, draft_pb2.BlockBatch] = {}
        num_tokens = 0
        for key, tree in round_.drafts:
            num_tokens += len(tree.token_ids)
            proposal = self._asked.pop(key, None)
            if proposal is not None:
                self._proposer.close(key)
                proposal.answer.set_result(Proposal(tree, draft_us))
                continue
            route = self._routes.answered(key)
            block = blocks.setdefault(route.link, draft_pb2.BlockBatch()).blocks.add(
                session=route.session,
                epoch=route.epoch,
                base_len=tree.base_len,
                token_ids=tree.token_ids,
                draft_us=draft_us,
            )
            if not _is_chain(tree):
                block.parents.extend(tree.parents)
        for link, batch in blocks.items():
            outgoing[link] = [draft_pb2.DraftRequest(blocks=batch)]
        self._lose(round_.lost, outgoing)
        self._hand_over(outgoing)
        if round_.drafts or round_.unfinished:
            self._metrics.draft_tokens.inc(num_tokens)
            self._metrics.cycle.observe(time.perf_counter() - self._started)
            self._metrics.forward.observe(round_.forward_s)
            self._metrics.batch_size.observe(len(round_.drafts) + len(round_.unfinished))
        if self._sessions_seen != self._proposer.num_sessions:
            self._sessions_seen = self._proposer.num_sessions
            self._metrics.sessions.set(self._sessions_seen)

    def give_up(self) -> None:
        """Loses the sessions of a cycle that failed; the scorer may open them again."""
        keys = [*self._routes.wanting, *self._asked]
        outgoing: dict[LinkId, list[draft_pb2.DraftRequest]] = {}
        for key in keys:
            self._proposer.close(key)
        self._lose(keys, outgoing)
        self._hand_over(outgoing)

    def close(self) -> None:
        """Forgets everything."""
        for proposal in self._asked.values():
            proposal.answer.set_exception(UnavailableError("the proposer stops"))
        for link in self._deliver:
            self._routes.drop_link(link)

    def _open_proposal(self, item: _Propose) -> None:
        if item.answer.set_running_or_notify_cancel():
            key = self._routes.new_key()
            self._asked[key] = item
            max_len = len(item.token_ids) + item.num_draft_tokens + 1
            self._proposer.open(key, item.token_ids, item.sampling, item.num_draft_tokens, max_len)

    def _lose(
        self, keys: Sequence[int], outgoing: dict[LinkId, list[draft_pb2.DraftRequest]]
    ) -> None:
        for key in keys:
            self._metrics.lost.inc()
            proposal = self._asked.pop(key, None)
            if proposal is not None:
                proposal.answer.set_exception(CapacityError("no room for another session"))
                continue
            route = self._routes.lost(key)
            lost = draft_pb2.Lost(session=route.session, epoch=route.epoch)
            outgoing.setdefault(route.link, []).append(draft_pb2.DraftRequest(lost=lost))

    def _hand_over(self, outgoing: dict[LinkId, list[draft_pb2.DraftRequest]]) -> None:
        for link, messages in outgoing.items():
            self._loop.call_soon_threadsafe(self._deliver[link], messages)


def _is_chain(tree: DraftTree) -> bool:
    return all(parent == i - 1 for i, parent in enumerate(tree.parents))
