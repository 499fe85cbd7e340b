"""The drafting thread, which runs one cycle after another.

A cycle applies all messages that have come, in order, and drafts once for all sessions that want a
draft. A session that committed twice meanwhile is drafted for once, and a slow method batches more
instead of falling behind. While scorers verify and no message comes, the cycle drafts ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, cast

from outrider.drafting.proposer import FeatureProposer, Proposer, ProposerTraits
from outrider.errors import DeadlineError
from outrider.process.watchdog import Watchdog
from outrider.rpc.tasks import first_of
from outrider.rpc.telemetry import Telemetry
from proposer_service.cycle import Cycle, Item, Stop
from proposer_service.inbox import Inbox
from proposer_service.metrics import ProposerMetrics

_log = logging.getLogger(__name__)

_MAX_FEATURE_BYTES: Final = 64 * 2**20  # hidden states that wait for the thread
_MAX_QUEUED: Final = 4096  # messages that wait for the thread
_MAX_FAILURES: Final = 3  # failed drafting cycles in a row until the process gives up


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """Facts about the built method, for Hello."""

    traits: ProposerTraits
    tokenizer_hash: str
    projection: bytes = b""  # the matrix of `traits.features.projection_sha256`


class DraftingThread:
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
        """Set on the loop when the thread has ended, for any reason, or hangs."""
        self.num_sessions = 0

    async def start(self, timeout_s: float) -> MethodInfo:
        """Wait until the method is built. Raises the error of `build`, or `DeadlineError`."""
        self._thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._built)
        except TimeoutError as error:
            raise DeadlineError(f"The method was not ready within {timeout_s:g} s.") from error

    async def until_ended(self) -> None:
        """Return when the thread has ended or hangs. Nothing else notices that it hangs."""
        await first_of(self.ended.wait(), self._watchdog.until_hung())
        self.ended.set()

    async def stop(self, timeout_s: float) -> None:
        """End the thread after its current cycle, and wait for it within the time."""
        if self._thread.ident is not None:
            self._inbox.put(Stop())
            await asyncio.to_thread(self._thread.join, timeout_s)

    @property
    def projection(self) -> bytes:
        """Return the matrix that scorers may ask for; the method must have been built."""
        assert self._method is not None
        return self._method.projection

    def put(self, item: Item) -> None:
        """Hand an item to the thread. A link is never used again after its `Detach`."""
        self._inbox.put(item)

    @property
    def is_full(self) -> bool:
        """Return whether messages of scorers should wait before they are put."""
        inbox = self._inbox
        return inbox.num_bytes > _MAX_FEATURE_BYTES or inbox.num_items >= _MAX_QUEUED

    # On the thread

    def _run(self) -> None:
        with contextlib.closing(self._inbox):
            self._build_and_draft()

    def _build_and_draft(self) -> None:
        if not self._built.set_running_or_notify_cancel():
            return
        try:
            proposer, tokenizer_hash = self._build()
        except BaseException as error:  # `start` raises it
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
