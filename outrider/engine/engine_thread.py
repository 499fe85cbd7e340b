"""The engine's thread, which does all torch work of the process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

from outrider.config import HAND_OVER_S
from outrider.draft_port import (
    MAX_BLOCKS_AT_ONCE,
    ColocatedEngine,
    ColocatedProposer,
    DraftOffer,
    EarlyTokens,
    PostedBlock,
)
from outrider.engine.engine import Engine
from outrider.engine.hidden_state_commands import HiddenStateCommands
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.errors import (
    CapacityError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    UnavailableError,
)
from outrider.process.watchdog import Watchdog
from outrider.types import EngineInfo, EngineSnapshot, Failure, Request, StepEvents

log = logging.getLogger(__name__)

_MAX_SLEEP_S = 60.0

_Work = Callable[[Engine], None]


class _Command(NamedTuple):
    session_id: int | None  # None: the command outlives the failure of all sessions
    work: _Work


class _NoProposer:
    """Implements `ColocatedProposer` where nothing is drafted on the engine's thread."""

    busy = False
    launched_drafts = None

    def draft_between_steps(self, engine: ColocatedEngine) -> None: ...

    def after_launch(self, engine: ColocatedEngine) -> None: ...


class EngineThread:
    """Runs an `Engine` on a thread of its own; implements `DraftingEngine`.

    The public methods are thread-safe and never wait for a step. They queue commands, which the
    thread carries out between two steps.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        on_events: Callable[[StepEvents], None],
        colocated: ColocatedProposer | None = None,
        on_early: Callable[[EarlyTokens], None] = lambda _: None,
    ) -> None:
        self._build = build
        self._on_events = on_events
        self._on_early = on_early
        self._colocated = colocated or _NoProposer()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._watchdog = Watchdog(self._thread)
        self._wakeup = threading.Condition()
        self.features = HiddenStateCommands(self._wakeup, self._push)
        # Under the condition's lock:
        self._commands: deque[_Command] = deque()
        self._blocks: dict[int, list[PostedBlock]] = {}
        self._sessions: set[int] = set()  # submitted and not yet ended
        self._submitted = 0  # submissions among the commands
        self._stopping = False
        self._snapshot = EngineSnapshot(0, 0, 0, 0)
        self._info: EngineInfo | None = None
        self._build_error: BaseException | None = None
        self._started = threading.Event()

    # Any thread.

    def start(self, timeout_s: float) -> EngineInfo:
        """Build the engine on its thread. Raises what `build` raises, or `DeadlineError`."""
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise DeadlineError(f"The engine was not ready within {timeout_s:.0f} s.")
        if self._info is None:
            assert self._build_error is not None
            raise self._build_error
        return self._info

    def submit(self, request: Request, constraint: ConstraintEditor | None = None) -> None:
        """Queue a request; `constraint` is its compiled one.

        Raises `InvalidRequestError`, `PromptTooLongError`, `CapacityError` when the queue is
        full, or `UnavailableError` before `start` and after `stop`.
        """
        info = self._info
        if info is not None:
            info.check(request)
        with self._wakeup:
            if info is None or self._stopping:
                raise UnavailableError("The engine is not running.")
            if request.session_id in self._sessions:
                raise InvalidRequestError("This session exists already.", param="session_id")
            snapshot = self._snapshot
            free_rows = max(0, info.max_num_seqs - snapshot.running - snapshot.waiting)
            if snapshot.waiting + self._submitted >= info.max_waiting + free_rows:
                raise CapacityError("Too many requests wait already. Try again later.")
            self._sessions.add(request.session_id)
            self._submitted += 1
            self._push(lambda engine: engine.submit(request, constraint), request.session_id)

    def between_same_steps(self) -> AbstractContextManager[object]:
        """Carry out all calls within this context between the same two steps."""
        return self._wakeup  # its lock may be taken again

    def run_between_steps(self, work: _Work, session_id: int | None = None) -> None:
        """Run `work` on the engine's thread, in order with all other calls.

        With a `session_id`, `work` is dropped if that session has ended.
        """
        with self._wakeup:
            if session_id is None or session_id in self._sessions:
                self._push(work, session_id)

    def abort(self, session_id: int) -> None:
        """End a session without further events. Unknown sessions are ignored."""
        with self._wakeup:
            if session_id in self._sessions:
                self._sessions.discard(session_id)
                self._blocks.pop(session_id, None)
                self._push(lambda engine: engine.abort(session_id), session_id)

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None:
        """Replace the proposer of a session."""
        self.run_between_steps(lambda engine: engine.set_drafting(session_id, offer), session_id)

    @property
    def drafting(self) -> bool:
        """Tell whether drafts are of use at present, with as many requests as there are now."""
        assert self._info is not None
        rows = min(len(self._sessions), self._info.max_num_seqs)
        return rows.bit_length() not in self._snapshot.undrafted_sizes

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        """Hand over drafts that arrived together; a step that waits for them takes all of them."""
        with self._wakeup:
            waiting = self._blocks
            for block in blocks:
                session_id = block.session_id
                if session_id not in self._sessions:
                    continue
                if (queue := waiting.get(session_id)) is None:
                    waiting[session_id] = [block]
                else:
                    queue.append(block)
                    del queue[:-MAX_BLOCKS_AT_ONCE]
            self._wakeup.notify()

    @property
    def running(self) -> bool:
        """False once the engine is to stop, or has broken down."""
        return not self._stopping

    async def until_hung(self) -> None:
        """Return when a step hangs; the engine counts as broken down then."""
        await self._watchdog.until_hung()
        self._break_down()

    def snapshot(self) -> EngineSnapshot:
        """Return how full the engine was after its last step."""
        return self._snapshot

    def stop(self, timeout_s: float) -> None:
        """End the thread after the present step; open sessions fail with `UnavailableError`.

        Raises `DeadlineError` if the step takes longer than `timeout_s`.
        """
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise DeadlineError(f"The engine did not stop within {timeout_s:.1f} s.")

    def _push(self, work: _Work, session_id: int | None = None, *, wakes: bool = True) -> None:
        self._commands.append(_Command(session_id, work))
        if wakes:
            self._wakeup.notify()

    # The engine's thread.

    def _main(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._build_error = error
            self._started.set()
            return
        self._snapshot = engine.snapshot()
        self._info = engine.info
        self._started.set()
        try:
            self._serve(engine)
        except Exception:  # the books are broken
            log.exception("the engine broke down")
            self._break_down()

    def _serve(self, engine: Engine) -> None:
        """Run steps until `stop` is called, the host's work beside the device's.

        A step is finalized and published while the device works on the next one. Where nobody
        drafts, that one is launched before the step is even collected. What arrives during a step
        is carried out before the next one is scheduled. An error ends all sessions, and not this
        loop.
        """
        while True:
            try:
                if not self._carry_out_commands(engine):
                    break
                if engine.launch_ahead():
                    engine.collect()
                    self._colocated.draft_between_steps(engine)
                    self._publish(engine, engine.finalize_step())
                    continue
                if engine.in_flight:
                    self._collect(engine)
                self._colocated.draft_between_steps(engine)
                engine.launch()
                self._publish(engine, engine.finalize_step())  # of the step before
                self._colocated.after_launch(engine)
                if not engine.may_launch_ahead:
                    self._collect(engine)  # without a step in flight, hidden states
            except Exception as error:
                log.exception("a step failed")
                failure = InternalError(f"The engine failed: {type(error).__name__}.")
                self._fail_all(engine, failure)
        self._fail_all(engine, UnavailableError("The engine stops."))

    def _collect(self, engine: Engine) -> None:
        """Wait for the step in flight, and let proposers draft while the next one is launched."""
        engine.collect()
        early = engine.early_tokens
        if early is not None:
            try:
                self._on_early(early)
            except Exception:
                log.exception("the receiver of early tokens failed")
            time.sleep(HAND_OVER_S)

    def _carry_out_commands(self, engine: Engine) -> bool:
        """Carry out what was queued; sleep first if nothing was, and no step could run.

        False if the engine is to stop: then nothing can be queued any more.
        """
        with self._wakeup:
            delay = 0.0 if self._colocated.busy else engine.wake_at - time.perf_counter()
            if delay > 0 and not (self._commands or self._blocks or self._stopping):
                self._watchdog.idle()
                self._wakeup.wait(min(delay, _MAX_SLEEP_S))
            self._watchdog.work()
            commands, self._commands = self._commands, deque()
            blocks, self._blocks = self._blocks, {}
            submitted, stopping = self._submitted, self._stopping
        for command in commands:
            command.work(engine)
        for queue in blocks.values():
            for block in queue:
                engine.post_block(block)
        if commands:
            with self._wakeup:
                self._submitted -= submitted
                self._snapshot = engine.snapshot()
        return not stopping

    def _fail_all(self, engine: Engine, error: OutriderError) -> None:
        """End all sessions, also those of which the engine knows nothing any more, or not yet."""
        try:
            self._publish(engine, engine.finalize_step())
        except Exception:
            log.exception("a step could not be finalized")
        engine.fail_all(error)
        with self._wakeup:
            kept = [command for command in self._commands if command.session_id is None]
            self._commands = deque(kept)
            self._submitted = 0
            failures = tuple(Failure(session_id, error) for session_id in self._sessions)
        self._publish(engine, StepEvents((), failures, None))

    def _break_down(self) -> None:
        error = UnavailableError("The engine broke down.")  # another one may go on
        with self._wakeup:
            self._stopping = True
            failures = tuple(Failure(session_id, error) for session_id in self._sessions)
            self._sessions.clear()  # a step that hangs may come back
        self._on_events(StepEvents((), failures, None))

    def _publish(self, engine: Engine, events: StepEvents | None) -> None:
        if events is None:
            return
        told, failures, grown = events.told, events.failures, events.grown
        ended = [c.session_id for c in told if c.finish_reason is not None]
        ended += [failure.session_id for failure in failures]
        with self._wakeup:
            # An abort may have come during the step: its session gets no further event.
            told = tuple([c for c in told if c.session_id in self._sessions])
            grown = grown.of(self._sessions)
            failures = tuple([f for f in failures if f.session_id in self._sessions])
            self._sessions.difference_update(ended)
            for session_id in ended:
                self._blocks.pop(session_id, None)
            self._snapshot = engine.snapshot()
        events = replace(events, told=told, failures=failures, grown=grown)
        try:
            self._on_events(events)
        except Exception:
            log.exception("the receiver of events failed")
