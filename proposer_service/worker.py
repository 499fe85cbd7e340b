"""The drafting thread: all of the method's work, one cycle after another.

A cycle takes every message that has come, applies them in order, and drafts once for all sessions
that want a draft. So a session that committed twice meanwhile is drafted for once, from its newest
state, and a slow method batches more instead of falling behind. If no message has come by then, the
scorer is verifying: the cycle goes on with guesses past the drafts, for the outcomes of that, until
a message comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, cast

from outrider.drafting.proposer import FeatureProposer, Proposer, ProposerTraits
from outrider.errors import CapacityError, DeadlineError
from outrider.params import SamplingParams, TokenIds
from outrider.rpc.tasks import first_of
from outrider.rpc.telemetry import Telemetry
from outrider.v1 import draft_pb2
from outrider.watchdog import Watchdog
from proposer_service.cycle import (
    Attach,
    Batch,
    Cycle,
    Detach,
    Proposal,
    Propose,
    Stop,
    Tell,
)
from proposer_service.inbox import Inbox
from proposer_service.metrics import ProposerMetrics
from proposer_service.routes import LinkId

_log = logging.getLogger(__name__)

_MAX_FEATURE_BYTES: Final = 64 * 2**20  # that wait for the thread; beyond, no more are read
_MAX_QUEUED: Final = 4096  # messages that wait for it
_MAX_FAILURES: Final = 3  # drafting cycles that fail in a row until the process gives up


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """What the built method is; part of Hello."""

    traits: ProposerTraits
    tokenizer_hash: str
    projection: bytes = b""  # the matrix of `traits.features.projection_sha256`


class DraftWorker:
    """Owns the method and its thread. Public methods are called from the event loop.

    `build` runs on the thread.
    """

    def __init__(
        self,
        build: Callable[[], tuple[Proposer, str]],
        loop: asyncio.AbstractEventLoop,
        metrics: ProposerMetrics,
        telemetry: Telemetry,
    ) -> None:
        self._build = build
        self._loop = loop
        self._metrics = metrics
        self._telemetry = telemetry
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)
        self._watchdog = Watchdog(self._thread)
        self._built: Future[MethodInfo] = Future()
        self._method: MethodInfo | None = None
        self.ended = asyncio.Event()
        """Set on the loop when the thread, after `start`, has ended, asked to or not, or hangs."""
        self.num_sessions = 0

    async def start(self, timeout_s: float) -> MethodInfo:
        """Wait until the method is built. Raises what building it raised, or `DeadlineError`."""
        self._thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._built)
        except TimeoutError as error:
            raise DeadlineError(f"The method was not ready within {timeout_s:g} s.") from error

    async def until_ended(self) -> None:
        """Return when the thread has ended or hangs; it is noticed here alone that it hangs."""
        await first_of(self.ended.wait(), self._watchdog.until_hung())
        self.ended.set()

    async def stop(self, timeout_s: float) -> None:
        """End the thread after its current cycle; waits for it within the time."""
        if self._thread.ident is not None:
            self._inbox.put(Stop())
            await asyncio.to_thread(self._thread.join, timeout_s)

    @property
    def projection(self) -> bytes:
        """The matrix that scorers may ask for; the method must have been built."""
        assert self._method is not None
        return self._method.projection

    def attach(self, stream: Attach) -> None:
        """A stream came up. Its link is never used again after `detach`."""
        self._inbox.put(stream)

    def detach(self, link: LinkId) -> None:
        """A stream went down: its sessions are forgotten."""
        self._inbox.put(Detach(link))

    def send(self, link: LinkId, message: draft_pb2.DraftRequest) -> None:
        """After what was drafted before; nothing happens if the stream went down."""
        self._inbox.put(Tell(link, message))

    def post(self, link: LinkId, message: draft_pb2.SessionBatch, rows: list[bytes]) -> bool:
        """Hands over what a scorer sent, and the rows of each of its features.

        False if the queue is full (try again later).
        """
        inbox = self._inbox
        if inbox.num_bytes > _MAX_FEATURE_BYTES or inbox.num_items >= _MAX_QUEUED:
            return False
        inbox.put(Batch(link, message, rows, time.perf_counter()))
        return True

    async def propose(
        self, token_ids: TokenIds, num_draft_tokens: int, sampling: SamplingParams
    ) -> Proposal:
        """Drafts after one prompt.

        Raises `CapacityError`, `UnavailableError`, or `InternalError` if drafting fails.
        """
        if self._inbox.num_items >= _MAX_QUEUED:
            raise CapacityError("the proposer's queue is full")
        answer: Future[Proposal] = Future()
        self._inbox.put(Propose(token_ids, num_draft_tokens, sampling, answer))
        return await asyncio.wrap_future(answer)

    # On the thread

    def _run(self) -> None:
        with contextlib.closing(self._inbox):
            self._build_and_draft()

    def _build_and_draft(self) -> None:
        if not self._built.set_running_or_notify_cancel():
            return
        try:
            proposer, tokenizer_hash = self._build()
        except BaseException as error:  # handed to whoever waits in start()
            self._built.set_exception(error)
            return
        projection = b""
        if proposer.traits.features is not None:
            projection = cast("FeatureProposer", proposer).projection
        self._method = MethodInfo(proposer.traits, tokenizer_hash, projection)
        self._built.set_result(self._method)
        cycle = Cycle(proposer, self._metrics, self._telemetry)
        failures = 0
        try:
            while failures < _MAX_FAILURES:
                self._watchdog.idle()
                items = self._inbox.take(wait=not cycle.has_work)
                self._watchdog.work()
                if not cycle.apply(items):
                    return
                try:
                    cycle.draft()
                    while self._inbox.is_empty and cycle.ahead():
                        self._watchdog.work()
                    failures = 0
                except Exception:  # a fault of the device or a bug: the sessions are given up
                    _log.exception("drafting failed")
                    failures += 1
                    cycle.give_up()
                self.num_sessions = proposer.num_sessions
        finally:
            cycle.close()
            with contextlib.suppress(RuntimeError):  # `stop` gave up waiting, and the loop closed
                self._loop.call_soon_threadsafe(self.ended.set)
