"""The engine: schedule, run, commit."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.config import EngineConfig
from outrider.draft_port import (
    DeviceDrafts,
    DraftOffer,
    NewTokens,
    PostedBlock,
    VerifyingRow,
    VerifyOutput,
)
from outrider.draft_tree import DraftTree
from outrider.engine.accounting import Arrived, Committed, count_block, settle
from outrider.engine.batch import Model
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.policy.adaptive import AdaptivePolicy
from outrider.engine.policy.base import Policy
from outrider.engine.policy.mode import DraftMode
from outrider.engine.rounds import USEFUL, BlockFate
from outrider.engine.runner import Pending, Runner, StepRunner
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Step, StepResult
from outrider.errors import ConfigError, InternalError
from outrider.params import TokenIds
from outrider.types import EngineInfo, EngineSnapshot, Failure, Request, StepEvents, StepTimings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step between its launch and its result."""

    step: Step
    pending: Pending
    launched_at: float
    timings: StepTimings  # as far as they are known


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that could not be launched: its requests fail where any other's result comes."""

    error: Exception

    verified = None

    def wait(self) -> StepResult:
        raise self.error


class Engine:
    """Decodes requests over one model. Lives in one thread; `EngineWorker` is its outside."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        policy: Policy | None = None,
        runner: StepRunner | None = None,
        features: HiddenStateStreams | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if (model.page_size, model.num_pages) != (config.page_size, config.num_pages):
            raise ConfigError("The model's KV cache and the engine's configuration differ in size.")
        self.info = EngineInfo(
            vocab_size=model.vocab_size,
            max_model_len=min(model.max_model_len, config.max_model_len),
            eos_token_ids=eos_token_ids,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_waiting=config.max_waiting,
            num_speculative_tokens=config.num_speculative_tokens,
            features=None if features is None else features.spec,
        )
        self.features = features
        """Of a model that captures hidden states; used on the engine's thread."""
        self._policy = policy or AdaptivePolicy(config.num_speculative_tokens)
        self._pool = BlockPool(config.num_pages, enable_prefix_caching=config.enable_prefix_caching)
        self._scheduler = Scheduler(config, self._policy, self._pool)
        self._set_aside: tuple[int, ...] = ()  # by the step that was launched last
        self._runner = runner or Runner(model)
        self._clock = clock
        self._idle_since = clock()
        self._result_at: float | None = None  # of the step before, if nothing was waited for since
        self._in_flight: _InFlight | None = None
        self._late: DeviceDrafts | None = None  # of the step to come
        self._arrived: list[Arrived] = []  # useful blocks, and not yet noted
        # True, and not yet told; with the seconds that it took to make it true.
        self._unsettled: tuple[Committed, StepTimings, StepResult, float] | None = None
        self._events: StepEvents | None = None  # until they are taken

    def step(self) -> StepEvents | None:
        """One round of all ready rows; None if none is ready before `wake_at`."""
        return self.take_events() if self.launch() and self.collect() else None

    def launch(self, drafted_s: float = 0.0) -> bool:
        """Hands the ready rows to the runner; False if none is ready before `wake_at`.

        Since the last step so many seconds were spent on drafts, on this thread.
        `collect` comes next. In between, `abort` must not be called. What the step before taught
        is taken in here, while the device works.
        """
        assert self._in_flight is None
        began = self._clock()
        if self._arrived and any(
            seq.draft is None and not seq.drafting.runs_ahead for seq in self._scheduler.running
        ):
            self._note_blocks()  # how long drafts on demand take says who waits for the others
        late, self._late = self._late, None
        step = self._scheduler.schedule(began)
        if step is None:
            self._result_at = None
            return False
        if late is not None:
            step = replace(step, late=late)
        scheduled = self._clock()
        try:
            pending = self._runner.launch(step)
        except Exception as error:
            pending = _Failed(error)
        launched = self._clock()
        timings = StepTimings(
            schedule_ms=(scheduled - began) * 1e3,
            forward_ms=0.0,
            verify_ms=0.0,
            commit_ms=0.0,
            idle_ms=(began - self._idle_since - drafted_s) * 1e3,
            num_rows=len(step.rows),
            num_tokens=step.num_tokens,
            gap_ms=None  # with late drafts the device is still busy with them
            if self._result_at is None or step.late is not None
            else (launched - self._result_at - drafted_s) * 1e3,
            draft_ms=drafted_s * 1e3,
        )
        self._in_flight = _InFlight(step, pending, scheduled, timings)
        self._settle()
        self._set_aside = self._scheduler.launched(step, began)
        return True

    def collect(self) -> bool:
        """Wait for the step in flight and makes its result true.

        Without one it begins to send hidden states that can be sent without a step. True if
        there is something to tell: `take_events`, when the next step is on its way.
        """
        assert self._unsettled is None, "take_events() comes first"
        if self._in_flight is None:
            sends = self.features is not None and self.features.due and self._gather()
            self._events = StepEvents((), (), None) if sends else None
            return sends
        flight, self._in_flight = self._in_flight, None
        if self.features is not None:
            self.features.read_ahead(flight.step)
        try:
            result = flight.pending.wait()
        except Exception as error:
            log.exception("a forward failed")
            failure = InternalError(f"The model's forward failed: {type(error).__name__}.")
            self._events = self._fail([row.seq.session_id for row in flight.step.rows], failure)
            return True
        self._result_at = now = self._clock()
        # A step with late drafts was launched before the device had come to it.
        took_s = (
            result.forward_s + result.verify_s if flight.step.late else now - flight.launched_at
        )
        committed = self._scheduler.commit(flight.step, result, took_s, now)
        self._gather()
        self._idle_since = self._clock()
        self._unsettled = committed, flight.timings, result, self._idle_since - now
        return True

    def take_events(self) -> StepEvents | None:
        """What the last `collect` brought about; None if nothing.

        Best when the next step is on its way: then the device waits neither for this nor for the
        copy of hidden states.
        """
        self._settle()
        events, self._events = self._events, None
        if events is None or self.features is None:
            return events
        return replace(events, features=self.features.take())

    @property
    def wake_at(self) -> float:
        """On the engine's clock: when `step` should be asked again if nothing happens before."""
        if self.features is not None and self.features.due:
            return 0.0
        return self._scheduler.wake_at

    def submit(self, request: Request, constraint: ConstraintEditor | None = None) -> None:
        """Queues a request that `EngineInfo.check` accepted, with what came of its constraint."""
        assert (constraint is None) == (request.constraint is None)
        stop = request.stop
        prompt_len = len(request.prompt_token_ids)
        eos = frozenset() if stop.ignore_eos else self.info.eos_token_ids
        self._scheduler.add(
            request,
            max_len=min(prompt_len + stop.max_tokens, self.info.max_model_len),
            stop_ids=stop.stop_token_ids | eos,
            now=self._clock(),
            constraint=constraint,
        )

    @property
    def verify_output(self) -> VerifyOutput | None:
        """Of the step in flight, where the device will have them; None: only the host will."""
        flight = self._in_flight
        if flight is None or flight.pending.verified is None:
            return None
        rows: list[VerifyingRow] = []
        with_logits = (row for row in flight.step.rows if row.slice.num_logits)
        for place, (seq, piece, draft, _) in enumerate(with_logits):
            wanted = seq.drafting.num_draft_tokens
            # A constraint may cut what is accepted.
            if wanted and not piece.parents and seq.constraint is None:
                rows.append(VerifyingRow(seq.session_id, place, len(draft), wanted))
        return VerifyOutput(rows, flight.pending.verified)

    @property
    def new_tokens(self) -> list[NewTokens]:
        """Return what the last `collect` committed, until `launch` or `take_events` counts it."""
        emitted = () if self._unsettled is None else self._unsettled[0].emitted
        return [
            NewTokens(
                seq.session_id,
                base_len,
                output,
                seq.drafting.num_draft_tokens,
                finish_reason is not None,
            )
            for seq, base_len, output, *_, finish_reason, _ in emitted
        ]

    def committed(self, session_id: int) -> TokenIds | None:
        """A session's text as of the last `collect`; None if it is unknown."""
        seq = self._scheduler.by_session.get(session_id)
        return None if seq is None else tuple(seq.token_ids)

    def abort(self, session_id: int) -> None:
        """Forgets a session; unknown ones too. No event follows."""
        assert self._in_flight is None
        if session_id in self._scheduler.by_session:
            self._scheduler.remove(session_id)

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None:
        """Replace the proposer of a session."""
        seq = self._scheduler.by_session.get(session_id)
        if seq is None:
            return
        self._note_blocks()  # of the proposer before
        if self.features is not None:
            self.features.follow(seq, offer.features)
        seq.drafting.can_run_ahead = offer.runs_ahead
        seq.drafting.own_device = offer.own_device
        seq.drafting.colocated = offer.colocated
        self._policy.attach(
            seq, offer.proposer_id, offer.max_draft_tokens, self._clock(), asked=offer.requested
        )

    def post_block(self, block: PostedBlock) -> BlockFate | None:
        """Take a block; None if the session is unknown or another proposer drafts for it."""
        seq = self._scheduler.by_session.get(block.session_id)
        if seq is None or seq.drafting.proposer_id != block.proposer_id:
            return None
        fate = seq.take_block(block.tree, block.method)
        at = self._clock() if block.arrived_at is None else block.arrived_at
        arrived = seq, block.tree, fate, block.proposer_id, block.method, block.draft_us * 1e-6, at
        if fate is USEFUL:  # the row has what it needs
            self._arrived.append(arrived)
        elif fate is not BlockFate.INVALID:
            count_block(self._policy, *arrived)
        return fate

    def schedule_with_device_drafts(self, drafts: DeviceDrafts) -> bool:
        """Let the next step verify drafts that the device will have by then.

        After its launch the drafts are to be posted. False, with nothing changed, unless the
        engine holds only rows that lack just these drafts: the tokens of a prompt fit no captured
        step, and a newcomer would wait for one more round.
        """
        sequences = self._scheduler.by_session
        ready = drafts.lengths.keys() == sequences.keys() and all(
            seq.admitted
            and seq.num_computed == len(seq.token_ids) - 1
            and not seq.needs_eager_sampling  # by drafts that the host has
            for seq in sequences.values()
        )
        if not ready or not self._runner.takes_device_drafts(
            len(sequences), max(drafts.lengths.values())
        ):
            return False
        for session, num_tokens in drafts.lengths.items():
            seq = sequences[session]
            seq.take_block(DraftTree.chain(len(seq.token_ids), (0,) * num_tokens))
        self._late = drafts
        return True

    def device_drafts_posted(self, seconds: float) -> None:
        """The late drafts of the step in flight were posted. They took so much longer than
        `launch` was told.
        """
        self._note_blocks()
        if (flight := self._in_flight) is not None:
            draft_ms = flight.timings.draft_ms + seconds * 1e3
            timings = replace(flight.timings, draft_ms=draft_ms)
            self._in_flight = replace(flight, timings=timings)

    def fail_all(self, error: Exception) -> StepEvents:
        """End every session with `error`; the engine can go on afterwards."""
        self._late = None
        if self._in_flight is not None:
            flight, self._in_flight = self._in_flight, None
            with contextlib.suppress(Exception):
                flight.pending.wait()  # before its pages go to others
        return self._fail(list(self._scheduler.by_session), error)

    def snapshot(self) -> EngineSnapshot:
        """How full the engine is."""
        return EngineSnapshot(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_pages=self._pool.num_free,
            total_pages=self.info.num_pages,
            undrafted_sizes=self._policy.undrafted_sizes,
        )

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the books do not agree. For tests."""
        self._scheduler.check_invariants()

    def _settle(self) -> None:
        """Count what the last step made true and the blocks since, and makes events of it."""
        self._note_blocks()
        if self._unsettled is not None:
            (committed, timings, result, commit_s), self._unsettled = self._unsettled, None
            timings = replace(
                timings,
                forward_ms=result.forward_s * 1e3,
                verify_ms=result.verify_s * 1e3,
                commit_ms=commit_s * 1e3,
            )
            on_demand = self._policy.way is DraftMode.ON_DEMAND
            commits, failures = settle(self._policy, committed), committed.failures
            counts = self._policy.take_counts()
            self._events = StepEvents(
                commits, failures, timings, self._set_aside, counts, on_demand=on_demand
            )

    def _note_blocks(self) -> None:
        arrived, self._arrived = self._arrived, []
        for each in arrived:
            count_block(self._policy, *each)

    def _gather(self) -> bool:
        return self.features is not None and self.features.gather(self._scheduler.by_session)

    def _fail(self, session_ids: list[int], error: Exception) -> StepEvents:
        failures = []
        for session_id in session_ids:
            self._scheduler.remove(session_id)
            failures.append(Failure(session_id, error))
        return StepEvents((), tuple(failures), None)
