"""Hidden states of vLLM's target that proposers are sent, as the native engine sends them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from outrider.draft_port import ThreadHiddenStates
from outrider.engine.hidden_states.streams import MAX_AHEAD_BYTES, HiddenStateStreams
from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.step import RowSlots
from outrider.features import FeatureBatch, FeatureOrder, FeatureSpec, FeatureWindow
from outrider.vllm.hosted_row import HostedRow

Located = Callable[[str], tuple[int, Sequence[int]]]
Slots = Callable[[], RowSlots]


class HostedStates:
    """Implements `HiddenStateControl`; sends committed rows of a pool that the steps fill.

    vLLM takes no commands between steps, so matrices are kept by a thread of their own, and room
    that proposers give back is counted when the next step has ended. Matrices that come before
    `begin` wait for it: a graph that vLLM captures is lost if another thread allocates meanwhile.
    """

    def __init__(self, pool: HiddenStatePool, located: Located, slots: Slots) -> None:
        """Send rows of `pool`.

        `located` returns how many positions of a request had states before its last step, and its
        pages, by vLLM's name for it. `slots` returns those of the running step's tokens.
        """
        self._streams = HiddenStateStreams(pool, max_ahead_bytes=MAX_AHEAD_BYTES)
        self._slots = slots
        self.on_thread: ThreadHiddenStates = self._streams
        """The states as a proposer on the stepping thread takes them."""
        self._located = located
        self._returned: deque[tuple[FeatureWindow, int]] = deque()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="outrider-projections")
        self._lock = threading.Lock()
        self._early: list[Callable[[], None]] | None = []  # what waits for `begin`
        self.broken = False
        """States of a step are missing: nothing is sent any more."""

    # Any thread.

    def give_back(self, window: FeatureWindow, size: int) -> None:
        """Return `size` bytes to a window."""
        self._returned.append((window, size))

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> Future[None]:
        """Keep a projection on the device; the future ends when it is there."""
        done: Future[None] = Future()

        def put() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                self._streams.put_projection(spec, matrix)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._submit(put)
        return done

    def drop_projection(self, sha256: bytes) -> None:
        """Forget a projection that no proposer uses."""
        self._submit(partial(self._streams.drop_projection, sha256))

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._early is None:
                self._copier.submit(job)
            else:
                self._early.append(job)

    # The stepping thread.

    def begin(self) -> None:
        """Let matrices be kept: vLLM has captured its graphs."""
        with self._lock:
            early, self._early = self._early or [], None
            for job in early:
                self._copier.submit(job)

    def follow(self, row: HostedRow, order: FeatureOrder | None) -> None:
        """Send a request's rows from the first on; None: no longer."""
        self._streams.follow(row, None if self.broken else order)

    def read_ahead(self, rows: Mapping[int, tuple[HostedRow, int]]) -> None:
        """Read what the running step computes, which the device has not yet.

        `rows` are those that go on from their last token with so many tokens, by place in the step.
        """
        if self.broken or not self._streams.any:
            return
        slots, firsts = self._slots()
        parts = [(row, len(row.token_ids) - 1, num_tokens) for row, num_tokens in rows.values()]
        self._streams.read_ahead(parts, RowSlots(slots, [firsts[place] for place in rows]))

    def begin_prompts(self, rows: Sequence[HostedRow]) -> None:
        """Begin to copy what the running step computes of prompts, before the next one runs."""
        if self.broken or not self._streams.any:
            return
        for row in rows:
            row.num_computed, row.block_table = self._located(row.name)
        self._streams.begin_prompts(rows)

    def collect(
        self, rows: Mapping[int, HostedRow], names: Iterable[str], advanced: Iterable[HostedRow]
    ) -> FeatureBatch | None:
        """Return what may be sent after a step.

        `rows` are all requests by session, `names` those that the step had, and `advanced` those
        among them that go on from a token that it emitted. Pages of others may be another's by now.
        """
        while self._returned:
            self._streams.give_back(*self._returned.popleft())
        if self.broken or not self._streams.any:
            return None
        within = {}
        for row in rows.values():
            row.num_computed = 0
            within[row.name] = row
        for row in advanced:
            row.num_computed = len(row.token_ids) - 1  # the last one was not computed yet
        for name in names:
            if (row_ := within.get(name)) is not None and not row_.ended:
                computed, row_.block_table = self._located(name)
                row_.num_computed = row_.num_computed or computed
        self._streams.gather(rows)
        return self._streams.take()
