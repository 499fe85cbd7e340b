"""The engine: schedule, run, commit."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from outrider.config import EngineConfig
from outrider.draft_port import (
    DeviceDrafts,
    DraftOffer,
    EarlyTokens,
    GrownText,
    PostedBlock,
    VerifyOutput,
)
from outrider.engine.accounting import Committed, finalize_step
from outrider.engine.batch import Model
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.in_flight import (
    CollectedStep,
    InFlight,
    StepClock,
    clear_places,
    hold_places,
    may_stay_on_device,
)
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.runner import FailedLaunch, Pending, Runner, StepRunner
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Step
from outrider.errors import ConfigError, InternalError
from outrider.params import TokenIds, Verification, VerificationRule
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import Policy
from outrider.rounds import USEFUL, BlockFate
from outrider.rows.tracker import ArrivedBlock
from outrider.types import EngineInfo, EngineSnapshot, Failure, Request, StepEvents

log = logging.getLogger(__name__)

SYNTHETIC_WARNING = (
    "SYNTHETIC ACCEPTANCE, for benchmarks only: drafts are accepted at the rates %s, whatever the "
    "model says. No text of this scorer is the model's."
)


class Engine:
    """Decodes requests over one model, on one thread; `EngineThread` is its outside.

    A step is launched, collected (its tokens are committed) and finalized (it is counted, and the
    policy learns from it). A step is best finalized when the next one has been launched.
    """

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
            synthetic=bool(config.synthetic_acceptance_rates),
        )
        self._synthetic: Verification | None = None
        if config.synthetic_acceptance_rates:
            rates = config.synthetic_acceptance_rates
            self._synthetic = Verification(VerificationRule.SYNTHETIC, rates=rates)
            log.warning(SYNTHETIC_WARNING, rates)
        self.features = features
        """Streams of a model that captures hidden states."""
        self._policy = policy or AdaptivePolicy(config.num_speculative_tokens)
        self._pool = BlockPool(config.num_pages, enable_prefix_caching=config.enable_prefix_caching)
        self._scheduler = Scheduler(config, self._policy, self._pool)
        self._tracker = self._scheduler.tracker
        self._runner = runner or Runner(model)
        self._clock = StepClock(clock)
        self._device_drafts: DeviceDrafts | None = None  # for the next step
        self._in_flight: InFlight | None = None
        self._behind: InFlight | None = None  # launched behind the step in flight
        self._collected: tuple[Committed, CollectedStep] | None = None  # not finalized yet
        self._failed: StepEvents | None = None  # a step that failed, not reported yet
        self._uncounted: list[ArrivedBlock] = []  # all of them useful

    def step(self) -> StepEvents | None:
        """Run one step from its schedule to its events; None if no row is ready."""
        if not self.launch():
            return None
        self.collect()
        return self.finalize_step()

    def launch(self) -> bool:
        """Hand the ready rows to the runner; False if none is ready before `wake_at`.

        No step may be in flight: see `launch_ahead`.
        """
        assert self._in_flight is None
        began = self._clock.now()
        if self._uncounted and any(
            seq.draft is None and not seq.drafting.runs_ahead for seq in self._scheduler.running
        ):
            self._count_blocks()  # the delay of drafts on demand decides who waits for the others
        drafts, self._device_drafts = self._device_drafts, None
        step = self._scheduler.schedule(began)
        if step is None:
            self._clock.nothing_ready()
            return False
        if drafts is not None:
            clear_places(drafts, step)
            step = replace(step, device_drafts=drafts)
            if step.has_prompts:  # its launch takes longer than the drafts, which come behind it
                self._tracker.measure_no_delay(row.seq for row in step.rows if row.draft)
        self._in_flight = self._launch(step, began)
        if self.features is not None:
            parts = ((seq, part.start, len(part.token_ids)) for seq, part, _, _, _ in step.rows)
            self.features.read_ahead(parts, self._in_flight.pending.slots)
        return True

    def launch_ahead(self) -> bool:
        """Launch the step behind the one in flight, so that the device waits for no host.

        False if there is none in flight, or it must be collected first: its draft decides what
        follows, say. `collect` then collects the older step.
        """
        if not self.may_launch_ahead:
            return False
        assert self._in_flight is not None
        assert self._in_flight.pending.verified is not None
        began = self._clock.now()
        verified = self._in_flight.pending.verified
        step = self._scheduler.schedule_ahead(self._in_flight.step, verified, began)
        if step is None:
            return False
        self._behind = self._launch(step, began, behind=True)
        return True

    @property
    def in_flight(self) -> bool:
        """Tell whether a step was launched and not collected."""
        return self._in_flight is not None

    @property
    def may_launch_ahead(self) -> bool:
        """Tell whether `launch_ahead` is worth a call before the step in flight is collected."""
        flight = self._in_flight
        if flight is None or self._behind is not None:
            return False
        return not flight.step.has_drafts and flight.pending.verified is not None

    def _launch(self, step: Step, began: float, *, behind: bool = False) -> InFlight:
        scheduled = self._clock.now()
        pending: Pending
        try:
            pending = self._runner.launch(step)
        except Exception as error:
            pending = FailedLaunch(error)
        return self._clock.launched(step, pending, began, scheduled, behind=behind)

    def collect(self) -> None:
        """Wait for the step in flight and commit its tokens; `finalize_step` comes next.

        Without a step in flight, hidden states that waited for room are sent.
        """
        assert self._collected is None, "finalize_step() comes first"
        if self._in_flight is None:
            if self.features is not None and self.features.due:
                self.features.gather(self._scheduler.by_session)
            return
        self._note_launch()
        flight, self._in_flight, self._behind = self._in_flight, self._behind, None
        try:
            result = flight.pending.wait()
        except Exception as error:
            log.exception("a forward failed")
            failure = InternalError(f"The model's forward failed: {type(error).__name__}.")
            failed = (row.seq.session_id for row in flight.step.rows if row.seq.admitted)
            self._failed = self._fail(list(failed), failure)
            return
        now = self._clock.result()
        took_s = flight.seconds(result, now)
        committed = self._scheduler.commit(flight.step, result, took_s, now)
        if self.features is not None:
            self.features.gather(self._scheduler.by_session)
        self._collected = committed, CollectedStep(flight, result, self._clock.committed(now))

    def finalize_step(self) -> StepEvents | None:
        """Count the step that was collected last, and return its events; None if there are none.

        When the next step has been launched, the device waits neither for this nor for the copy
        of hidden states.
        """
        self._count_blocks()
        events, self._failed = self._failed, None
        if self._collected is not None:
            (committed, collected), self._collected = self._collected, None
            told, grown = finalize_step(self._tracker, committed)
            events = StepEvents(
                told,
                committed.failures,
                collected.timings,
                collected.flight.set_aside or (),
                self._tracker.account.take(),
                grown=grown,
            )
        self._note_launch()
        features = None if self.features is None else self.features.take()
        if features is None:
            return events
        return replace(events or StepEvents((), (), None), features=features)

    @property
    def wake_at(self) -> float:
        """Time on the engine's clock at which there is more to do if nothing arrives before."""
        if self._in_flight is not None or self._collected is not None or self._failed is not None:
            return 0.0
        if self.features is not None and (self.features.due or self.features.copied):
            return 0.0
        return self._scheduler.wake_at

    def submit(self, request: Request, constraint: ConstraintEditor | None = None) -> None:
        """Queue a request that `EngineInfo.check` accepted; `constraint` is its compiled one.

        With synthetic acceptance, that replaces the request's own verification.
        """
        if self._synthetic is not None:
            speculation = replace(request.speculation, verification=self._synthetic)
            request = replace(request, speculation=speculation)
        assert (constraint is None) == (request.constraint is None)
        stop = request.stop
        prompt_len = len(request.prompt_token_ids)
        eos = frozenset() if stop.ignore_eos else self.info.eos_token_ids
        self._scheduler.add(
            request,
            max_len=min(prompt_len + stop.max_tokens, self.info.max_model_len),
            stop_ids=stop.stop_token_ids | eos,
            now=self._clock.now(),
            constraint=constraint,
        )

    def abort(self, session_id: int) -> None:
        """Forget a session, known or not. No event follows, whatever is in flight."""
        seq = self._scheduler.by_session.get(session_id)
        if seq is not None:
            self._tracker.learn([seq])  # a stop string may end most texts
            self._scheduler.remove(session_id)

    def fail_all(self, error: Exception) -> StepEvents:
        """End every session with `error`; the engine can go on afterwards."""
        self._device_drafts = None
        while self._in_flight is not None:
            flight, self._in_flight, self._behind = self._in_flight, self._behind, None
            with contextlib.suppress(Exception):
                flight.pending.wait()  # before its pages go to others
        return self._fail(list(self._scheduler.by_session), error)

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None:
        """Replace the proposer of a session."""
        seq = self._scheduler.by_session.get(session_id)
        if seq is None:
            return
        self._count_blocks()  # of the proposer before
        if self.features is not None:
            self.features.follow(seq, offer.features)
        self._tracker.attach(seq, offer, self._clock.now())

    def post_block(self, block: PostedBlock) -> BlockFate | None:
        """Take a block; None if the session is unknown or another proposer drafts for it."""
        seq = self._scheduler.by_session.get(block.session_id)
        if seq is None or seq.drafting.offered.proposer.proposer_id != block.proposer_id:
            return None
        fate = seq.take_block(block.tree, block.method)
        at = self._clock.now() if block.arrived_at is None else block.arrived_at
        if fate is USEFUL:  # the row can run, and counting can wait
            self._uncounted.append((seq, block, fate, at))
        elif fate is not BlockFate.INVALID:
            self._tracker.blocks_arrived([(seq, block, fate, at)])
        return fate

    # For a proposer on the engine's thread.

    @property
    def grown_texts(self) -> list[GrownText]:
        """Return texts that the last `collect` added to, until `finalize_step` counts them."""
        if self._collected is None:
            return []
        # A draft is of use only after the step in flight, whose tokens will ask for it.
        return self._collected[0].grown_texts(drafting=self._in_flight is None)

    def asks(self, session_id: int) -> bool:
        """Tell whether a session's next round is to have a draft; False if it is unknown."""
        seq = self._scheduler.by_session.get(session_id)
        return seq is not None and seq.drafting.num_draft_tokens > 0

    @property
    def early_tokens(self) -> EarlyTokens | None:
        """Return what proposers are to hear of the last `collect` before the next launch."""
        return None if self._collected is None else self._collected[0].early_tokens()

    @property
    def verify_output(self) -> VerifyOutput | None:
        """Return where the device will have the result of the step in flight.

        None if only the host will have it. Rows are left out that draft no more, or whose
        constraint may cut what is accepted.
        """
        return None if self._in_flight is None else self._in_flight.verify_output

    def committed(self, session_id: int) -> TokenIds | None:
        """Return the prompt and output of a session; None if it is unknown."""
        seq = self._scheduler.by_session.get(session_id)
        return None if seq is None else tuple(seq.token_ids)

    def schedule_with_device_drafts(self, drafts: DeviceDrafts) -> bool:
        """Let the next step verify drafts that the device will have by then.

        After its launch the drafts are to be posted. False, with nothing changed, unless all of
        them are for rows that lack just their draft, and no other row has one at hand.
        """
        sequences = self._scheduler.by_session
        if self._in_flight is not None or not may_stay_on_device(drafts, sequences):
            return False
        hold_places(drafts, sequences)
        others = [seq for seq in self._scheduler.running if seq.draft is None]
        self._tracker.draft_nothing([seq for seq in others if seq.drafting.proposer.colocated])
        self._device_drafts = drafts
        return True

    def count_drafting(self, seconds: float) -> None:
        """Count time that this thread spent on drafts: of the step in flight, or of the next."""
        if self._in_flight is None:
            self._clock.count_drafting(seconds)
            return
        self._count_blocks()
        self._in_flight.draft_s += seconds

    # For observers.

    def snapshot(self) -> EngineSnapshot:
        """Return how full the engine is."""
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

    def _note_launch(self) -> None:
        """Tell the policy of the step in flight, once all that came before it has been counted."""
        flight = self._in_flight
        if flight is not None and flight.set_aside is None:
            self._count_blocks()
            flight.set_aside = self._scheduler.launched(flight.step, flight.began)

    def _count_blocks(self) -> None:
        if self._uncounted:
            arrived, self._uncounted = self._uncounted, []
            self._tracker.blocks_arrived(arrived)

    def _fail(self, session_ids: list[int], error: Exception) -> StepEvents:
        failures = []
        for session_id in session_ids:
            self._scheduler.remove(session_id)
            failures.append(Failure(session_id, error))
        return StepEvents((), tuple(failures), None)
