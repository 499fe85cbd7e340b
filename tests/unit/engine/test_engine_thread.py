"""The engine's thread: concurrency, failures, stopping. Nothing may hang."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from outrider.config import EngineConfig
from outrider.draft_port import (
    NO_DRAFTS,
    ColocatedEngine,
    ColocatingEngine,
    DraftingEngine,
    DraftOffer,
    EarlyTokens,
    NewTokens,
    PostedBlock,
)
from outrider.draft_tree import DraftTree
from outrider.engine.batch import PackedBatch
from outrider.engine.engine import Engine
from outrider.engine.engine_thread import EngineThread
from outrider.engine.runner import Pending, Runner
from outrider.engine.sequence import Sequence
from outrider.engine.step import Step, StepResult
from outrider.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    PromptTooLongError,
    UnavailableError,
)
from outrider.features import FeatureWindow
from outrider.params import SamplingParams, StopParams, TokenIds
from outrider.policy.base import FixedPolicy, Policy, Ready, StepDone
from outrider.policy.row import Drafting
from outrider.process import watchdog
from outrider.rows.tracker import DraftTracker
from outrider.types import Commit, FinishReason, Request, StepEvents
from tests.support.models.at_once import AtOnce
from tests.support.models.hash_model import HashModel, Sequential

CONFIG = EngineConfig(page_size=4, num_pages=512, max_model_len=64, max_num_batched_tokens=256)
GREEDY = SamplingParams(temperature=0.0)
BOUND_S = 20.0


class Gate(HashModel):
    """Its forward waits while the gate is closed, and fails while told to."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        super().__init__(32, config.page_size, config.num_pages, config.max_model_len)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.failures = 0

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        self.entered.set()
        assert self.open.wait(BOUND_S)
        if self.failures:
            self.failures -= 1
            super().forward(batch)  # what it wrote must not be believed
            raise RuntimeError("the device fell over")
        return super().forward(batch)


class Recorder(AtOnce):
    """A runner that writes down what happens, and whose launches fail while told to.

    Without `ahead`, nothing tells of a step before its result is there.
    """

    def __init__(self, model: HashModel, diary: list[str], *, ahead: bool = False) -> None:
        super().__init__(model)
        self.diary = diary
        self.ahead = ahead
        self.failures = 0

    def launch(self, step: Step) -> Pending:
        self.diary.append("launch")
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device fell over")
        launch = super().launch if self.ahead else super(AtOnce, self).launch
        pending, diary = launch(step), self.diary

        class Waiting:
            verified, slots = pending.verified, pending.slots

            def wait(self) -> StepResult:
                diary.append("wait")
                return pending.wait()

        return Waiting()


class Inbox:
    """Collects events; `wait` blocks until sessions have ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ended: dict[int, FinishReason | Exception] = {}
        self.steps: list[StepEvents] = []
        self._news = threading.Condition()

    def __call__(self, events: StepEvents) -> None:
        with self._news:
            self.steps.append(events)
            for commit in events.commits:
                assert commit.session_id not in self.ended
                self.tokens[commit.session_id] += commit.token_ids
                if commit.finish_reason is not None:
                    self.ended[commit.session_id] = commit.finish_reason
            for failure in events.failures:
                assert failure.session_id not in self.ended
                self.ended[failure.session_id] = failure.error
            self._news.notify_all()

    def wait(self, done: Callable[[Inbox], bool]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: done(self), BOUND_S), "nothing came in time"

    def commits(self, session_id: int) -> list[Commit]:
        return [c for events in self.steps for c in events.commits if c.session_id == session_id]


@contextmanager
def running(
    model: HashModel,
    config: EngineConfig = CONFIG,
    policy: Policy | None = None,
    runner: Runner | None = None,
    inbox: Inbox | None = None,
    on_early: Callable[[EarlyTokens], None] = lambda _: None,
) -> Iterator[tuple[EngineThread, Inbox, Engine]]:
    inbox = inbox or Inbox()
    engines: list[Engine] = []

    def build() -> Engine:
        engines.append(Engine(model, config, policy=policy, runner=runner))
        return engines[0]

    thread = EngineThread(build, inbox, on_early=on_early)
    thread.start(BOUND_S)
    try:
        yield thread, inbox, engines[0]
    finally:
        thread.stop(BOUND_S)
        engines[0].check_invariants()
        assert engines[0].snapshot().free_pages == config.num_pages


def request(session_id: int, max_tokens: int = 12, **sampling: object) -> Request:
    prompt = tuple((session_id * 7 + i * i) % 32 for i in range(1 + session_id % 23))
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Request(session_id, prompt, params, StopParams(max_tokens=max_tokens))


def submit_until_refused(thread: EngineThread, session_ids: range) -> int:
    for count, session_id in enumerate(session_ids):
        try:
            thread.submit(request(session_id))
        except CapacityError:
            return count
    raise AssertionError("never refused")


def test_engine_thread_with_200_requests_answers_all() -> None:
    model = Gate()
    truth = Sequential(model)
    with running(model) as (thread, inbox, _):
        requests = [request(i, temperature=i % 2, seed=i) for i in range(200)]
        for r in requests:
            thread.submit(r)
        inbox.wait(lambda box: len(box.ended) == 200)
        assert max(s.timings.num_rows for s in inbox.steps if s.timings) == 128
        for r in requests:
            assert inbox.tokens[r.session_id] == truth.output(r, 64, frozenset())[0]


def test_engine_thread_with_failing_forward_fails_only_its_requests() -> None:
    model = Gate()
    with running(model) as (thread, inbox, _):
        model.failures = 1
        thread.submit(request(1))
        inbox.wait(lambda box: 1 in box.ended)
        assert isinstance(inbox.ended[1], InternalError)
        thread.submit(again := request(24))  # shares its first pages with nothing believed
        inbox.wait(lambda box: 24 in box.ended)
        assert inbox.tokens[24] == Sequential(model).output(again, 64, frozenset())[0]


def test_engine_thread_with_failing_launch_fails_only_its_requests() -> None:
    model = Gate()
    runner = Recorder(model, [])
    runner.failures = 1
    with running(model, runner=runner) as (thread, inbox, _):
        thread.submit(request(1))
        inbox.wait(lambda box: 1 in box.ended)
        assert isinstance(inbox.ended[1], InternalError)
        thread.submit(again := request(24))
        inbox.wait(lambda box: 24 in box.ended)
        assert inbox.tokens[24] == Sequential(model).output(again, 64, frozenset())[0]


class Breaking(FixedPolicy):
    """Fails where nothing should: as a step is scheduled, or as its result is taken in."""

    def __init__(self) -> None:
        super().__init__(4)
        self.at_result = 0
        self.at_schedule = 0

    def choose_rows(
        self, ready: list[Sequence], waiting: Rows[Sequence], num_prefilling: int, now: float
    ) -> Ready:
        if self.at_schedule:
            self.at_schedule -= 1
            raise RuntimeError("a bug")
        return super().choose_rows(ready, waiting, num_prefilling, now)

    def step_done(self, step: StepDone) -> None:  # noqa: ARG002
        if self.at_result:
            self.at_result -= 1
            raise RuntimeError("a bug")


def test_engine_thread_with_bug_answers_forgotten_sessions() -> None:
    policy = Breaking()
    policy.at_result = 1
    with running(Gate(), policy=policy) as (thread, inbox, _):
        thread.submit(request(1, max_tokens=1))  # ended, but nobody was told yet
        inbox.wait(lambda box: 1 in box.ended)
        assert isinstance(inbox.ended[1], InternalError)
        thread.submit(request(2))
        inbox.wait(lambda box: 2 in box.ended)
        assert inbox.ended[2] is FinishReason.LENGTH


def test_engine_thread_with_failing_schedule_publishes_the_step_before() -> None:
    model, policy = Gate(), Breaking()
    policy.at_schedule = 1
    with running(model, policy=policy) as (thread, inbox, _):
        model.open.clear()
        thread.submit(request(0))
        assert model.entered.wait(BOUND_S)
        thread.submit(request(1))  # for the next step, which fails
        model.open.set()
        inbox.wait(lambda box: {0, 1} <= {*box.ended})
        assert len(inbox.tokens[0]) == 1, "told before it failed"
        assert all(isinstance(inbox.ended[i], InternalError) for i in (0, 1))


def test_engine_thread_with_two_bugs_goes_on() -> None:
    policy = Breaking()
    policy.at_schedule = policy.at_result = 1  # of the second step, and of the first
    with running(Gate(), policy=policy) as (thread, inbox, _):
        thread.submit(request(1))
        inbox.wait(lambda box: 1 in box.ended)
        assert isinstance(inbox.ended[1], InternalError)
        thread.submit(request(2))
        inbox.wait(lambda box: 2 in box.ended)
        assert inbox.ended[2] is FinishReason.LENGTH


def test_engine_thread_with_bug_answers_queued_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    start = DraftTracker.start

    def breaking(tracker: DraftTracker, request: Request) -> Drafting:
        if request.session_id == 2:
            raise RuntimeError("a bug")
        return start(tracker, request)

    monkeypatch.setattr(DraftTracker, "start", breaking)
    model = Gate()
    with running(model) as (thread, inbox, _):
        model.open.clear()
        thread.submit(request(1))
        assert model.entered.wait(BOUND_S)
        for session_id in (2, 3):
            thread.submit(request(session_id))
        model.open.set()
        inbox.wait(lambda box: {1, 2, 3} <= {*box.ended})
        assert all(isinstance(inbox.ended[i], InternalError) for i in (1, 2, 3))
        thread.submit(request(4))
        inbox.wait(lambda box: 4 in box.ended)
        assert inbox.ended[4] is FinishReason.LENGTH


def torn(_: DraftTracker, seq: Sequence) -> None:
    """Fail as a row is preempted, and leave it in the wrong queue."""
    seq.admitted = True
    raise RuntimeError("a bug")


def test_engine_thread_with_inconsistent_accounting_breaks_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftTracker, "preempted", torn)
    config = replace(CONFIG, num_pages=16, max_model_len=64)
    model, inbox = Gate(config), Inbox()
    thread = EngineThread(lambda: Engine(model, config, policy=FixedPolicy(4)), inbox)
    thread.start(BOUND_S)
    model.open.clear()
    for session_id in (1, 2):
        thread.submit(request(session_id, max_tokens=40))  # too long for both
    model.open.set()
    inbox.wait(lambda box: {1, 2} <= {*box.ended})
    assert all(isinstance(inbox.ended[i], UnavailableError) for i in (1, 2)), "go on elsewhere"
    assert not thread.running
    with pytest.raises(UnavailableError):
        thread.submit(request(3))
    thread.stop(BOUND_S)


def test_engine_thread_publishes_a_step_while_the_next_is_in_flight() -> None:
    diary: list[str] = []

    class Reader(Inbox):
        def __call__(self, events: StepEvents) -> None:
            diary.append("publish")
            super().__call__(events)

    model = Gate()
    with running(model, runner=Recorder(model, diary), inbox=Reader()) as (thread, inbox, _):
        thread.submit(request(1, max_tokens=3))
        inbox.wait(lambda box: 1 in box.ended)
        first, second, third = (s.timings for s in inbox.steps)
    begin, middle, end = ["launch"], ["wait", "launch", "publish"], ["wait", "publish"]
    assert diary[:9] == begin + middle + middle + end
    timings = [each for each in (first, second, third) if each is not None]
    assert all(min(each.forward_ms, each.verify_ms, each.commit_ms) > 0 for each in timings)
    gaps = [each.gap_ms for each in timings]
    assert gaps[0] is None, "it followed no step"
    assert all(gap is not None and gap > 0 for gap in gaps[1:])


def test_engine_thread_where_nobody_drafts_launches_before_it_waits() -> None:
    diary: list[str] = []
    model = Gate()
    with running(model, runner=Recorder(model, diary, ahead=True)) as (thread, inbox, _):
        thread.submit(asked := request(1, max_tokens=4))
        inbox.wait(lambda box: 1 in box.ended)
        assert diary == ["launch", *["launch", "wait"] * 3, "wait"]  # none behind the last one
        assert inbox.tokens[1] == Sequential(model).output(asked, 64, frozenset())[0]
        stats = inbox.commits(1)[-1].stats
        assert stats is not None
        assert (stats.iter_count, stats.rounds, stats.fallback_rounds) == (4, 4, 3)


def test_engine_thread_that_launches_ahead_with_200_requests_answers_all() -> None:
    model = Gate()
    truth = Sequential(model)
    stops = frozenset({3, 17})  # rows end that run already behind
    with running(model, runner=AtOnce(model)) as (thread, inbox, _):
        requests = [request(i, temperature=i % 2, seed=i) for i in range(200)]
        requests = [replace(r, stop=replace(r.stop, stop_token_ids=stops)) for r in requests]
        for r in requests:
            thread.submit(r)
            if r.session_id % 20 == 19:
                thread.abort(r.session_id - 5)
        kept = [r for r in requests if r.session_id % 20 != 14]
        inbox.wait(lambda box: {r.session_id for r in kept} <= {*box.ended})
        for r in kept:
            assert inbox.tokens[r.session_id] == truth.output(r, 64, frozenset())[0]


def test_engine_thread_with_failing_step_behind_fails_only_its_requests() -> None:
    model = Gate()
    with running(model, runner=AtOnce(model)) as (thread, inbox, _):
        model.failures = 1
        model.open.clear()
        thread.submit(request(1))
        thread.submit(request(2))
        model.open.set()
        inbox.wait(lambda box: {1, 2} <= {*box.ended})
        thread.submit(again := request(24))
        inbox.wait(lambda box: 24 in box.ended)
        assert inbox.tokens[24] == Sequential(model).output(again, 64, frozenset())[0]


def test_engine_thread_without_next_step_publishes_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hidden states that waited for room: the draft that the next step waits for needs them."""
    with running(HashModel(32, 4, 512, 64)) as (thread, inbox, engine):
        due = threading.Event()
        collect = engine.collect

        def with_states() -> None:
            collect()
            if due.is_set():
                due.clear()
                engine._failed = StepEvents((), (), None)

        monkeypatch.setattr(engine, "collect", with_states)
        due.set()
        window = FeatureWindow()
        window.short = True
        thread.features.give_back(window, 0)  # wakes the thread, as a proposer that has read does
        inbox.wait(lambda inbox: any(events.timings is None for events in inbox.steps))


def test_engine_thread_start_with_build_error_raises_it() -> None:
    def build() -> Engine:
        raise ConfigError("no such model")

    thread = EngineThread(build, Inbox())
    with pytest.raises(ConfigError, match="no such model"):
        thread.start(BOUND_S)
    thread.stop(BOUND_S)
    with pytest.raises(UnavailableError):
        thread.submit(request(1))


def test_engine_thread_start_with_slow_build_times_out() -> None:
    release = threading.Event()

    def build() -> Engine:
        assert release.wait(BOUND_S)
        return Engine(HashModel(num_pages=512), CONFIG)

    thread = EngineThread(build, Inbox())
    with pytest.raises(DeadlineError):
        thread.start(0.01)
    release.set()
    thread.stop(BOUND_S)


def test_engine_thread_stop_does_not_wait_for_drafts() -> None:
    with running(Gate(), policy=FixedPolicy(4, max_wait_s=3600)) as (thread, inbox, _):
        thread.submit(request(1))
        thread.set_drafting(1, DraftOffer("a", 4))
        inbox.wait(lambda box: len(box.tokens[1]) == 1)
        thread.stop(BOUND_S)  # raises if it waits
        assert isinstance(inbox.ended[1], UnavailableError)
        with pytest.raises(UnavailableError):
            thread.submit(request(2))


class AloneOnly(FixedPolicy):
    """Has something drafted for a single row."""

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        return frozenset(range(2, 10))


def test_engine_thread_with_policy_for_one_request_drafts_for_one_only() -> None:
    model = Gate()
    with running(model, policy=AloneOnly(4)) as (thread, inbox, _):
        model.open.clear()
        assert thread.drafting
        thread.submit(request(1))
        assert thread.drafting
        thread.submit(request(2))
        assert not thread.drafting
        model.open.set()
        inbox.wait(lambda box: len(box.ended) == 2)
        assert thread.drafting


def test_engine_thread_stop_with_hung_forward_times_out() -> None:
    model = Gate()
    with running(model) as (thread, _, _):
        model.open.clear()
        thread.submit(request(1))
        assert model.entered.wait(BOUND_S)
        with pytest.raises(DeadlineError):
            thread.stop(0.02)
        model.open.set()


def until_hung(thread: EngineThread, timeout_s: float) -> None:
    asyncio.run(asyncio.wait_for(thread.until_hung(), timeout_s))


def test_engine_thread_with_hung_forward_breaks_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.2)
    model = Gate()
    with running(model) as (thread, inbox, _):
        model.open.clear()
        thread.submit(request(1))
        until_hung(thread, BOUND_S)
        assert isinstance(inbox.ended[1], UnavailableError), "it goes on elsewhere"
        with pytest.raises(UnavailableError):
            thread.submit(request(2))
        model.open.set()
    assert inbox.tokens == {}, "it came back too late"
    assert "the engine thread hangs" in caplog.text
    assert "in forward" in caplog.text, "where it hangs"
    assert "the receiver of events failed" not in caplog.text


def test_engine_thread_without_work_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.1)
    with running(Gate()) as (thread, inbox, _):
        thread.submit(request(1))
        inbox.wait(lambda box: 1 in box.ended)
        with pytest.raises(TimeoutError):
            until_hung(thread, 0.5)
        assert thread.running


def test_engine_thread_when_assigned_satisfies_the_drafting_protocols() -> None:
    with running(Gate()) as (thread, _, engine):
        outside: DraftingEngine = thread  # mypy checks these assignments
        colocating: ColocatingEngine = thread
        inside: ColocatedEngine = engine
        assert outside.drafting
        assert colocating.features is outside.features
        assert inside.grown_texts == []


def draft(session_id: int, base_len: int, token_ids: TokenIds) -> PostedBlock:
    """A chain of proposer "a" that has just come."""
    tree = DraftTree.chain(base_len, token_ids)
    return PostedBlock(session_id, tree, "a", 100, time.perf_counter(), "ngram")


def test_engine_thread_with_posted_block_wakes_the_waiting_row() -> None:
    model = Gate()
    with running(model, policy=FixedPolicy(4, max_wait_s=3600)) as (thread, inbox, _):
        r = request(5, max_tokens=4)
        truth = Sequential(model).output(r, 64, frozenset())[0]
        thread.submit(r)
        thread.set_drafting(5, DraftOffer("a", 4))
        inbox.wait(lambda box: len(box.tokens[5]) == 1)
        base = len(r.prompt_token_ids)
        thread.post_blocks([draft(5, base, truth)])
        inbox.wait(lambda box: 5 in box.ended)
        assert inbox.tokens[5] == truth
        stats = inbox.commits(5)[-1].stats
        assert stats is not None
        assert (stats.rounds, stats.accepted, stats.waits, stats.hits) == (2, 2, 1, 0)
        assert stats.wait_ms > 0
        assert stats.proposer_ids == ("a",)


def test_engine_thread_with_blocks_posted_together_uses_one_step() -> None:
    model = Gate()
    with running(model, policy=FixedPolicy(4, max_wait_s=3600)) as (thread, inbox, _):
        blocks = []
        for i in range(8):
            r = request(i, max_tokens=4)
            truth = Sequential(model).output(r, 64, frozenset())[0]
            blocks.append(draft(i, len(r.prompt_token_ids), truth))
            thread.submit(r)
            thread.set_drafting(i, DraftOffer("a", 4))
        inbox.wait(lambda box: all(len(box.tokens[i]) == 1 for i in range(8)))
        thread.post_blocks(blocks)
        inbox.wait(lambda box: len(box.ended) == 8)
        assert len(inbox.steps[-1].commits) == 8


def test_engine_thread_tells_proposers_of_a_step_before_it_launches_the_next() -> None:
    diary: list[str] = []
    early: list[EarlyTokens] = []

    def on_early(tokens: EarlyTokens) -> None:
        diary.append("early")
        early.append(tokens)

    model, config = Gate(), CONFIG
    policy = FixedPolicy(4, max_wait_s=3600)
    with running(model, config, policy, Recorder(model, diary), on_early=on_early) as (
        thread,
        inbox,
        _,
    ):
        drafted, alone = request(5, max_tokens=6), request(6, max_tokens=6)
        truth = Sequential(model).output(drafted, 64, frozenset())[0]
        with thread.between_same_steps():
            thread.submit(drafted)
            thread.submit(alone)
            thread.set_drafting(5, DraftOffer("a", 4))
            thread.post_blocks([draft(5, len(drafted.prompt_token_ids), truth[:3])])
        inbox.wait(lambda box: 6 in box.ended)
        thread.set_drafting(5, DraftOffer(None, 0))
        inbox.wait(lambda box: 5 in box.ended)
    assert diary[:4] == ["launch", "wait", "early", "launch"]
    first = early[0]
    assert first.step_s > 0
    assert {row.session_id for each in early for row in each.rows} == {5}, "the other has none"
    base = len(drafted.prompt_token_ids)
    assert first.rows == (NewTokens(5, base, tuple(truth[:4])),)


def test_engine_thread_whose_receiver_of_early_tokens_fails_goes_on() -> None:
    """As of events: an event loop may have been closed."""

    def on_early(_: EarlyTokens) -> None:
        raise RuntimeError("Event loop is closed")

    policy = FixedPolicy(4, max_wait_s=0.0)
    with running(Gate(), policy=policy, on_early=on_early) as (thread, inbox, _):
        with thread.between_same_steps():
            thread.submit(request(5))
            thread.set_drafting(5, DraftOffer("a", 4))
        inbox.wait(lambda box: 5 in box.ended)
        assert inbox.ended[5] is FinishReason.LENGTH


def test_engine_thread_when_proposer_leaves_releases_the_row() -> None:
    with running(Gate(), policy=FixedPolicy(4, max_wait_s=3600)) as (thread, inbox, _):
        thread.submit(request(5))
        thread.set_drafting(5, DraftOffer("a", 4))
        inbox.wait(lambda box: len(box.tokens[5]) == 1)
        thread.set_drafting(5, NO_DRAFTS)
        inbox.wait(lambda box: 5 in box.ended)
        assert inbox.ended[5] is FinishReason.LENGTH


def test_engine_thread_with_full_queue_refuses_until_it_empties() -> None:
    config = EngineConfig(
        page_size=4, num_pages=64, max_model_len=64, max_num_seqs=2, max_waiting=3
    )
    model = Gate(config)
    with running(model, config) as (thread, inbox, _):
        model.open.clear()
        thread.submit(request(0))
        assert model.entered.wait(BOUND_S)
        accepted = 1 + submit_until_refused(thread, range(1, 20))
        assert 4 <= accepted <= 6
        model.open.set()
        inbox.wait(lambda box: len(box.ended) == accepted)
        thread.submit(request(99))
        inbox.wait(lambda box: 99 in box.ended)


def test_engine_thread_after_many_aborts_keeps_nothing() -> None:
    with running(Gate()) as (thread, inbox, _):
        for i in range(300):
            thread.submit(request(i, max_tokens=40))
            thread.set_drafting(i, DraftOffer("a", 4))
            thread.post_blocks([draft(i, 1, (1, 2, 3))])
            thread.abort(i - i % 3)
            thread.abort(10_000 + i)
        kept = {i for i in range(300) if i % 3}
        inbox.wait(lambda box: kept <= box.ended.keys())
        assert all(inbox.ended[i] is FinishReason.LENGTH for i in kept)


def test_engine_thread_with_impossible_request_refuses_it() -> None:
    with running(Gate()) as (thread, _, _):
        with pytest.raises(InvalidRequestError, match="below 32"):
            thread.submit(Request(1, (5, 32), GREEDY))
        with pytest.raises(InvalidRequestError, match="below 32"):
            thread.submit(Request(1, (-1,), GREEDY))
        with pytest.raises(PromptTooLongError, match="no room for a generated one"):
            thread.submit(Request(1, (1,) * 64, GREEDY))
        thread.submit(request(2, max_tokens=40))
        with pytest.raises(InvalidRequestError, match="already"):
            thread.submit(request(2))


def test_engine_thread_with_raising_receiver_goes_on() -> None:
    ended = threading.Event()

    def receive(events: StepEvents) -> None:
        if any(commit.finish_reason for commit in events.commits):
            ended.set()
        raise RuntimeError("the loop is closed")

    thread = EngineThread(lambda: Engine(HashModel(num_pages=512), CONFIG), receive)
    thread.start(BOUND_S)
    thread.submit(request(1))
    assert ended.wait(BOUND_S)
    thread.stop(BOUND_S)
