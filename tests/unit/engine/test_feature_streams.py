"""What fails while hidden states are read costs drafts: never a request, nor another proposer."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.engine_thread import EngineThread
from outrider.engine.hidden_states import streams
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.kv_cache.hidden_states import HiddenStatePool
from outrider.engine.runner import EagerStep, Runner
from outrider.features import FeatureOrder, FeatureWindow
from outrider.params import SamplingParams, StopParams
from outrider.policy.base import FixedPolicy, Policy
from outrider.policy.row import Drafting
from outrider.types import Request, StepEvents
from tests.support.models.at_once import AtOnce
from tests.support.models.features import CAPTURED, row
from tests.support.simulators.feature_world import Eager, FeatureModel

CONFIG = EngineConfig(page_size=4, num_pages=64, max_model_len=128, max_num_batched_tokens=64)
PROMPT = tuple(range(20))


def make(
    max_wait_s: float = 0.0, policy: Policy | None = None, runner: type[Runner] = Runner
) -> Engine:
    model = FeatureModel(32, CONFIG.page_size, CONFIG.num_pages, CONFIG.max_model_len)
    streams = HiddenStateStreams(model.capture())
    policy = policy or FixedPolicy(3, max_wait_s=max_wait_s)
    return Engine(model, CONFIG, policy=policy, features=streams, runner=runner(model))


def request(session_id: int, max_tokens: int = 6) -> Request:
    stop = StopParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(session_id, PROMPT, SamplingParams(temperature=0.0), stop)


def follow(engine: Engine, session_id: int, window: FeatureWindow) -> None:
    engine.submit(request(session_id))
    engine.set_drafting(session_id, DraftOffer("p", 3, features=FeatureOrder(1, CAPTURED, window)))


@contextmanager
def running(
    max_wait_s: float = 0.0,
) -> Iterator[tuple[EngineThread, queue.SimpleQueue[StepEvents], Engine]]:
    events: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
    engines: list[Engine] = []

    def build() -> Engine:
        engines.append(make(max_wait_s))
        return engines[0]

    thread = EngineThread(build, events.put)
    thread.start(20)
    try:
        yield thread, events, engines[0]
    finally:
        thread.stop(20)


def test_streams_after_failed_copy_free_the_window() -> None:
    engine, window = make(), FeatureWindow()
    follow(engine, 1, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HiddenStatePool, "read", _broken)
        events = engine.step()
    assert events is not None
    assert events.commits
    assert events.features is None
    assert window.on_the_way == 0
    follow(engine, 2, window)
    events = engine.step()
    assert events is not None
    assert events.features is not None
    [rows] = events.features.rows
    assert (rows.session_id, window.on_the_way) == (2, len(rows.rows))


def test_engine_with_failed_copy_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (thread, events, _):
        monkeypatch.setattr(streams, "FeatureRows", _broken)
        window = FeatureWindow()
        thread.submit(request(1))
        thread.set_drafting(1, DraftOffer("p", 3, features=FeatureOrder(1, CAPTURED, window)))
        tokens = 0
        while tokens < 6:
            for commit in events.get(timeout=20).commits:
                tokens += len(commit.token_ids)
        assert window.on_the_way == 0


@pytest.mark.parametrize(("num_bytes", "most"), [(7 * CAPTURED.row_bytes, 7), (1, 1)])
def test_streams_in_one_step_read_bounded_rows(
    num_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_READ_BYTES", num_bytes)
    engine = make()
    order = FeatureOrder(1, CAPTURED, FeatureWindow())
    for session in (1, 2):
        engine.submit(request(session, max_tokens=60))
        engine.set_drafting(session, DraftOffer("p", 3, features=order))
    sent = {1: 0, 2: 0}
    while sent[1] + sent[2] < 2 * len(PROMPT):
        if (events := engine.step()) is None:
            engine.collect()
            events = engine.finalize_step()
        assert events is not None
        features = events.features
        assert features is not None
        counts = [len(part.rows) // CAPTURED.row_bytes for part in features.rows]
        assert 0 < sum(counts) <= most
        for part, count in zip(features.rows, counts, strict=True):
            assert part.start == sent[part.session_id]
            sent[part.session_id] += count


class Switched(FixedPolicy):
    """Wants drafts while it is on."""

    on = False

    @property
    def stance(self) -> object:
        return self.on

    def choose_counts(self, rows: Sequence[Drafting]) -> list[int]:
        return [self.on * count for count in super().choose_counts(rows)]


def undrafted(runner: type[Runner] = Runner) -> tuple[Engine, Switched]:
    """An engine with a long prompt, whose proposer reads hidden states, and its policy."""
    policy = Switched(3, max_wait_s=0.0)
    engine, window = make(policy=policy, runner=runner), FeatureWindow()
    prompt = tuple(i % 30 for i in range(80))
    engine.submit(replace(request(1, max_tokens=40), prompt_token_ids=prompt))
    engine.set_drafting(1, DraftOffer("p", 3, features=FeatureOrder(1, CAPTURED, window)))
    return engine, policy


def sent(events: StepEvents | None) -> list[tuple[int, bytes]]:
    """Return the first position of each part, and its rows."""
    if events is None or events.features is None:
        return []
    return [(part.start, bytes(part.rows)) for part in events.features.rows]


def test_streams_without_wanted_draft_keep_rows_in_the_pool() -> None:
    engine, policy = undrafted()
    assert not any(sent(engine.step()) for _ in range(10))
    policy.on = True
    parts = [part for _ in range(3) for part in sent(engine.step())]
    sizes = [len(rows) // CAPTURED.row_bytes for _, rows in parts]
    assert sizes[0] > 80
    assert [start for start, _ in parts] == [sum(sizes[:i]) for i in range(len(parts))]


def test_streams_after_steps_launched_ahead_send_the_same_rows() -> None:
    """Whoever launched each step, all rows are there when drafts are wanted again."""
    lazy, policy = undrafted()
    for _ in range(10):
        lazy.step()
    policy.on = True
    [(start, expected)] = [part for _ in range(2) for part in sent(lazy.step())][:1]

    engine, policy = undrafted(AtOnce)
    engine.launch()
    ahead = 0
    for i in range(12):
        policy.on = i >= 9
        behind = engine.launch_ahead()
        ahead += behind
        engine.collect()
        if not behind:
            engine.launch()
        if found := sent(engine.finalize_step()):
            break
    assert ahead > 6
    at, rows = found[0]
    assert at == start == 0
    shared = min(len(rows), len(expected))
    assert shared > 85 * CAPTURED.row_bytes
    assert rows[:shared] == expected[:shared]


def test_streams_for_late_proposer_send_without_a_step() -> None:
    """The row may wait for its draft, and its draft for them."""
    engine, window = make(), FeatureWindow()
    engine.submit(request(1))
    assert engine.step() is not None
    engine.set_drafting(1, DraftOffer("p", 3, features=FeatureOrder(1, CAPTURED, window)))
    engine.collect()
    events = engine.finalize_step()
    assert events is not None
    assert events.features is not None
    [rows] = events.features.rows
    assert (rows.start, len(rows.rows)) == (0, len(PROMPT) * CAPTURED.row_bytes)


def test_engine_thread_with_rows_waiting_for_room_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only row waits for its draft, and its draft for what is read meanwhile."""
    monkeypatch.setattr("outrider.features.MAX_ON_THE_WAY", 3 * CAPTURED.row_bytes)
    with running(max_wait_s=60.0) as (thread, events, _):
        window = FeatureWindow()
        thread.submit(request(1))
        thread.set_drafting(1, DraftOffer("p", 3, features=FeatureOrder(1, CAPTURED, window)))
        num_rows = 0
        while num_rows < len(PROMPT):
            if (batch := events.get(timeout=20).features) is not None:
                size = sum(len(part.rows) for part in batch.rows)
                num_rows += size // CAPTURED.row_bytes
                thread.features.give_back(window, size)


def test_engine_thread_after_failed_step_keeps_commands_of_no_session() -> None:
    with running() as (thread, events, engine):
        assert engine.features is not None
        entered, go_on = queue.SimpleQueue[None](), queue.SimpleQueue[None]()

        def failing() -> None:
            entered.put(None)
            go_on.get(timeout=20)
            raise RuntimeError("a bug")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "launch", failing)
            thread.submit(request(1))
            entered.get(timeout=20)
            window = FeatureWindow()
            window.on_the_way = 10
            spec = replace(CAPTURED, projection_dim=1, projection_sha256=bytes(32))
            thread.features.give_back(window, 10)
            done = thread.features.put_projection(spec, bytearray(spec.projection_bytes))
        go_on.put(None)
        done.result(timeout=20)
        assert window.on_the_way == 0
        assert events.get(timeout=20).failures


def _broken(*_: Any) -> None:
    raise RuntimeError("the device fell over")


def test_streams_with_prompt_leave_room_for_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_ROUND_ROWS", 8)
    monkeypatch.setattr("outrider.features.MAX_ON_THE_WAY", 9 * CAPTURED.row_bytes)
    engine = make()
    order = FeatureOrder(1, CAPTURED, FeatureWindow(), FeatureWindow())
    engine.submit(request(1, max_tokens=30))
    engine.set_drafting(1, DraftOffer("p", 3, features=order))
    engine.step()
    assert order.prompts.on_the_way == 9 * CAPTURED.row_bytes  # and 11 rows wait for room
    assert (order.prompts.short, order.window.on_the_way) == (True, 0)
    short = Request(2, PROMPT[:4], SamplingParams(temperature=0.0), StopParams(max_tokens=9))
    engine.submit(short)
    engine.set_drafting(2, DraftOffer("p", 3, features=order))
    events = engine.step()
    assert events is not None
    assert events.features is not None
    assert {part.session_id: part.of_prompt for part in events.features.rows} == {2: False}


@pytest.mark.parametrize("right", [True, False])
def test_streams_read_rows_of_a_round_ahead(right: bool) -> None:
    """Where steps run once they are launched: with the verdict there is nothing left to read."""
    model = FeatureModel(32, CONFIG.page_size, CONFIG.num_pages, CONFIG.max_model_len)
    streams = HiddenStateStreams(model.capture(), max_ahead_bytes=3 * CAPTURED.row_bytes)
    engine = Engine(
        model, CONFIG, policy=FixedPolicy(3, max_wait_s=0.0), runner=Eager(model), features=streams
    )
    engine.submit(request(1, max_tokens=20))
    engine.set_drafting(1, DraftOffer("p", 3, features=FeatureOrder(1, CAPTURED, FeatureWindow())))
    events = engine.step()
    text, sent = list(PROMPT), len(PROMPT)
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        _note(patch, HiddenStatePool, "read", done)
        _note(patch, EagerStep, "wait", done)
        for _ in range(2):
            assert events is not None
            text += events.commits[0].token_ids
            draft = [int(model.logits_of(text).argmax())]
            draft.append(int(model.logits_of([*text, *draft]).argmax()) if right else 31)
            engine.post_block(PostedBlock(1, DraftTree.chain(len(text), draft), "p", 1))
            events = engine.step()
            assert events is not None
            assert events.features is not None
            accepted = len(events.commits[0].token_ids) - 1
            assert accepted == (2 if right else 1)
            [rows] = events.features.rows
            assert rows.start == sent
            sent += 1 + accepted
            known = [*text, *draft[:accepted]]
            wanted = [row(known[: p + 1], CAPTURED) for p in range(rows.start, sent)]
            assert bytes(rows.rows) == torch.cat(wanted).view(torch.uint8).numpy().tobytes()
    assert done == ["read", "wait"] * 2


def test_streams_send_no_rows_that_were_read_unless_no_draft_is_wanted() -> None:
    """Those stay in the pool: the proposer does not hear of the text until it is asked again."""
    model = FeatureModel(32, CONFIG.page_size, CONFIG.num_pages, CONFIG.max_model_len)
    streams = HiddenStateStreams(model.capture(), max_ahead_bytes=3 * CAPTURED.row_bytes)
    policy, order = Switched(3, max_wait_s=0.0), FeatureOrder(1, CAPTURED, FeatureWindow())
    policy.on = True
    engine = Engine(model, CONFIG, policy=policy, runner=Eager(model), features=streams)
    engine.submit(request(1, max_tokens=20))
    engine.set_drafting(1, DraftOffer("p", 3, features=order))
    first = len(PROMPT)
    [(start, rows)] = sent(engine.step())
    assert (start, len(rows)) == (0, first * CAPTURED.row_bytes)
    found: list[list[tuple[int, int]]] = []
    for asks in (True, False, True, True):
        engine.launch()
        states = streams.on_device(CAPTURED)
        if states is not None and len(found) < 2:
            streams.were_read(states, [0])
        policy.on = asks
        engine.collect()
        events = engine.finalize_step()
        assert streams._seconds == 0.0 or not policy.on, "the time it took is told each step"
        found.append([(at, len(rows) // CAPTURED.row_bytes) for at, rows in sent(events)])
    assert found == [[], [], [(first + 1, 2)], [(first + 3, 1)]]


def _note(patch: pytest.MonkeyPatch, owner: type, name: str, calls: list[str]) -> None:
    method = getattr(owner, name)

    def noted(*args: Any) -> Any:
        calls.append(name)
        return method(*args)

    patch.setattr(owner, name, noted)
