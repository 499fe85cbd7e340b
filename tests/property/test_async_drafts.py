"""Drafts that are enqueued behind a verification are those made after it, or dropped."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.drafting.async_drafts import AsyncRow
from outrider.drafting.draft_model.loops import DraftModelLoops
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.drafters import AsyncLoop
from outrider.drafting.graphs.loop_inputs import make_shapes
from outrider.drafting.graphs.loops import DraftSampler, LoopCapture
from outrider.drafting.proposer import ProposerLimits, SessionKey, SessionStart
from outrider.engine.engine import Engine
from outrider.engine.graphs.decode_buckets import Bucket, make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.decode_inputs import DecodeInputs
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import Runner, StepRunner
from outrider.engine.sampling.verify import choose_and_verify
from outrider.engine.step import Step
from outrider.params import SamplingParams
from outrider.policy.base import FixedPolicy
from outrider.policy.draft_times import DraftTimes
from outrider.types import Request
from tests.support.models.by_tensors import by_tensors
from tests.support.models.recordable import RecordableHashModel, recordable_llama, rerun
from tests.support.services.drafting_scorer import (
    EDITED,
    SAMPLINGS,
    DraftingScorer,
    DraftListener,
    K,
    draw_requests,
    enqueued,
)

WIDTH = 6  # what the target chooses per row at most


class Drafting:
    """Sessions of one proposer whose drafts are verified, and what is known of each."""

    def __init__(self, seed: int, num_pages: int = 200) -> None:
        self.rng = random.Random(seed)
        model = RecordableHashModel(num_pages=num_pages)
        shapes = make_shapes(rows=(1, 2, 4), query_lens=(1, 2, 16), num_tokens=(1, 2, K, 6))
        loops = DraftModelLoops(model, LoopCapture(shapes, rerun, DraftSampler()))
        self.proposer = DraftModelProposer(
            model, name="hash", limits=ProposerLimits(max_branches=0), chain_drafter=loops
        )
        self.lengths: dict[SessionKey, int] = {}
        self.held: dict[SessionKey, tuple[int, ...]] = {}
        self.wanted: dict[SessionKey, int] = {}
        self.newcomers: set[SessionKey] = set()
        self.launched = 0

    def open(self, key: SessionKey) -> None:
        length = self.rng.randint(1, 20)
        prompt = [self.rng.randrange(60) for _ in range(length)]
        self.proposer.open(key, SessionStart(prompt, self.rng.choice(SAMPLINGS), K, 110))
        self.lengths[key], self.wanted[key], self.held[key] = length, K, ()
        self.newcomers.add(key)

    def draft(self) -> dict[SessionKey, tuple[int, ...]]:
        """Whatever is wanted, until all have it."""
        left = [key for key in self.lengths if self.wanted[key]]
        drafts: dict[SessionKey, tuple[int, ...]] = {}
        while left:
            done = self.proposer.draft(left)
            self.proposer.check_invariants()
            assert not done.lost
            drafts |= {key: tree.token_ids for key, tree in done.drafts}
            drafts |= {key: self.proposer._sessions[key].held for key in done.at_hand}
            assert all(tree.base_len == self.lengths[key] for key, tree in done.drafts)
            left = done.unfinished
        # A newcomer gets none while others are drafted for behind a step.
        drafts |= dict.fromkeys(self.newcomers & drafts.keys(), ())
        self.newcomers -= drafts.keys()
        for key in sorted(drafts):  # the policy may verify less of it
            self.held[key] = drafts[key][: self.rng.randint(0, K)]
        return drafts

    def verify(self, *, behind: bool) -> None:
        """A step verifies all drafts, `behind` which the next ones are enqueued, and ends."""
        keys = sorted(self.lengths)
        self.rng.shuffle(keys)
        verify_output = torch.full((len(keys) + 1, 1 + WIDTH), 61, dtype=torch.int32)
        rows: list[AsyncRow] = []
        for i, key in enumerate(keys):
            draft = self.held[key]
            accepted = self.rng.randint(0, len(draft))
            verify_output[i, 0] = accepted
            chosen = [*draft[:accepted], self.rng.randrange(60)]
            verify_output[i, 1 : 2 + accepted] = torch.tensor(chosen)
            self.wanted[key] = self.rng.randint(0, K) if self.rng.random() < 0.3 else K
            rows.append(AsyncRow(key, i, len(draft), max(1, self.wanted[key])))
        ended = self.rng.randrange(3 * len(keys)) if keys else 0
        if behind:
            random.Random(1).shuffle(rows)
            self.proposer.launch_after_verify(rows, verify_output)
            assert self.proposer._async_drafts is not None
            self.launched += self.proposer._async_drafts.in_flight
        for i, key in enumerate(keys):
            output = verify_output[i, 1 : 2 + int(verify_output[i, 0])].tolist()
            if i == ended:  # its text is cut at a stop
                self.proposer.commit(key, self.lengths[key], output[:1], K)
                self.end(key)
                continue
            self.proposer.commit(key, self.lengths[key], output, self.wanted[key])
            self.lengths[key] += len(output)
            self.held[key] = ()

    def end(self, key: SessionKey) -> None:
        self.proposer.close(key)
        self.newcomers.discard(key)
        for known in (self.lengths, self.held, self.wanted):
            known.pop(key, None)


def texts(seed: int, *, behind: bool) -> tuple[list[dict[SessionKey, tuple[int, ...]]], int]:
    """All drafts of some rounds in which sessions come and go."""
    world = Drafting(seed)
    chances = random.Random(seed)  # the same with and without
    said = []
    for key in range(3):
        world.open(key)
    for round_ in range(14):
        said.append(world.draft())
        world.verify(behind=behind)
        if chances.random() < 0.2 and world.lengths:
            world.end(chances.choice(sorted(world.lengths)))
        if chances.random() < 0.2 and len(world.lengths) < 4:
            world.open(10 + round_)
    return said, world.launched


@settings(max_examples=24, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_async_drafts_launched_after_verify_equal_later_drafts(seed: int) -> None:
    after, _ = texts(seed, behind=False)
    behind, launched = texts(seed, behind=True)
    assert behind == after
    assert launched > 0


def test_async_drafts_once_launched_are_not_drafted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Drafting(3)
    for key in range(4):
        world.open(key)
    world.draft()
    world.verify(behind=True)
    world.wanted = dict.fromkeys(world.wanted, K)
    monkeypatch.setattr(DraftModelLoops, "draft", None)
    drafts = dict(world.proposer.draft(list(world.lengths)).drafts)
    assert len(drafts) > 2
    assert sorted(drafts) == sorted(world.lengths)


def test_async_drafts_without_free_pages_wait_for_the_step() -> None:
    world = Drafting(5, num_pages=32)
    for key in range(4):
        world.open(key)
    world.draft()
    pool = world.proposer._pool
    taken = [pool.allocate() for _ in range(pool.num_free)]
    world.verify(behind=True)
    assert world.launched == 0
    pool.release(taken)
    assert len(world.draft()) > 0


def draft_model() -> DraftModelProposer:
    """Nearly the target."""
    model = recordable_llama(num_pages=96, noise=0.02)
    shapes = make_shapes(rows=(1, 2, 4), query_lens=(1, 2, 16), num_tokens=(1, 2, K))
    loops = DraftModelLoops(model, LoopCapture(shapes, rerun, DraftSampler()))
    return DraftModelProposer(
        model, name="llama", limits=ProposerLimits(max_branches=0), chain_drafter=loops
    )


def captured_runner(model: PagedModel) -> DecodeGraphs:
    model._backend = by_tensors
    buckets = [*make_buckets(4, (1, K + 1)), *(Bucket(K + 1, 4, False, n) for n in (7, 10))]
    return DecodeGraphs(model, buckets, capture=rerun, choose_and_verify=choose_and_verify)


def run(
    requests: list[Request],
    *,
    drafts: bool,
    runner: Callable[[PagedModel], StepRunner] = captured_runner,
    rates: tuple[float, ...] = (),
) -> tuple[int, dict[int, list[int]]]:
    model = recordable_llama(num_pages=96)
    config = EngineConfig(
        page_size=4,
        num_pages=96,
        max_num_seqs=4,
        max_model_len=100,
        synthetic_acceptance_rates=rates,
    )
    policy = FixedPolicy(K if drafts else 0, max_wait_s=0.0)
    engine = Engine(model, config, policy=policy, runner=runner(model))
    return DraftingScorer(engine, draft_model() if drafts else None).run(requests)


def test_engine_with_device_drafts_emits_the_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def noted(*args: Any) -> Any:
            counts[name] += 1
            return method(*args)

        monkeypatch.setattr(owner, name, noted)

    counted(DraftModelLoops, "draft")
    counted(DecodeInputs, "take_device_drafts")
    requests = draw_requests(97)
    num_plain, plain = run(requests, drafts=False)
    num_late, late = run(requests, drafts=True)
    assert late == plain
    assert num_late < 0.6 * num_plain
    assert counts["take_device_drafts"] > 3 * counts["draft"] > 0, "all but those beside prompts"
    # Without it the steps are the same: what is late is what is verified.
    counts.clear()
    monkeypatch.setattr(Engine, "schedule_with_device_drafts", lambda *_: False)
    assert run(requests, drafts=True) == (num_late, plain)
    assert counts["take_device_drafts"] == 0 < counts["draft"]
    monkeypatch.setattr(Engine, "verify_output", None)
    assert run(requests, drafts=True) == (num_late, plain)
    assert counts["draft"] > 0.9 * num_late


@pytest.mark.parametrize("samplings", [SAMPLINGS, (*SAMPLINGS, EDITED)], ids=["", "edited"])
def test_async_drafts_behind_prompts_are_launched(
    samplings: tuple[SamplingParams, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, where steps that are not captured are enqueued as well."""
    counts: Counter[str] = Counter()
    draft, take_device_drafts = DraftModelLoops.draft, DecodeInputs.take_device_drafts

    def drafted(*args: Any) -> Any:
        counts["draft"] += 1
        return draft(*args)

    def taken(*args: Any) -> None:
        counts["late"] += 1
        take_device_drafts(*args)

    monkeypatch.setattr(DraftModelLoops, "draft", drafted)
    monkeypatch.setattr(DecodeInputs, "take_device_drafts", taken)
    monkeypatch.setattr(Runner, "launch", enqueued)
    requests = draw_requests(97, samplings=samplings)
    num_plain, plain = run(requests, drafts=False)
    num_late, late = run(requests, drafts=True)
    assert late == plain
    assert num_late < 0.7 * num_plain  # drafts do not foresee penalties
    assert counts["draft"] <= 2, "for those that begin where nobody else is drafted for"
    assert counts["late"] > (0.75 if samplings is SAMPLINGS else 0.2) * num_late


def test_eager_steps_with_device_drafts_emit_the_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps with prompts are eager: other rows' drafts stay on the device there, too."""
    requests = draw_requests(97)
    captured = run(requests, drafts=True)
    monkeypatch.setattr(Runner, "launch", enqueued)
    beside_prompts = 0
    launch, observe = Engine._launch, DraftTimes.observe
    delays: list[float] = []

    def noted(engine: Engine, step: Step, began: float, **how: Any) -> Any:
        nonlocal beside_prompts
        if step.has_prompts and step.device_drafts is not None:
            beside_prompts += 1
            time.sleep(0.5)  # no draft is that late
        return launch(engine, step, began, **how)

    def observed(times: DraftTimes, at: float, seconds: float, *more: Any, **how: Any) -> None:
        delays.append(seconds)
        observe(times, at, seconds, *more, **how)

    monkeypatch.setattr(Engine, "_launch", noted)
    monkeypatch.setattr(DraftTimes, "observe", observed)
    assert run(requests, drafts=True, runner=Runner)[1] == captured[1]
    assert beside_prompts > 0
    assert len(delays) > 5
    assert max(delays) < 0.5


def test_eager_steps_accept_synthetically_what_the_device_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Runner, "launch", enqueued)
    requests, rates = draw_requests(97), (1.0,) * K
    late, _ = run(requests, drafts=True, runner=Runner, rates=rates)
    monkeypatch.setattr(Engine, "schedule_with_device_drafts", lambda *_: False)
    assert run(requests, drafts=True, runner=Runner, rates=rates)[0] == late


def test_device_drafts_that_are_never_posted_cost_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step verifies what the device has; nobody can say any more what that was."""
    requests = draw_requests(97)
    _, plain = run(requests, drafts=False)
    launch_after_verify = DraftModelLoops.launch_after_verify
    calls = 0

    def failing(*args: Any) -> AsyncLoop[list[int]] | None:
        nonlocal calls
        calls += 1
        loop: AsyncLoop[list[int]] | None = launch_after_verify(*args)
        if loop is None or calls % 3:
            return loop
        return replace(loop, wait=broken)

    def broken(_wanted: Sequence[int]) -> list[list[int]]:
        raise RuntimeError("the device fell over")

    monkeypatch.setattr(DraftModelLoops, "launch_after_verify", failing)
    monkeypatch.setattr(DraftListener, "lost", lambda *_: None)
    _, late = run(requests, drafts=True)
    assert late == plain
    assert calls >= 3


def test_device_drafts_that_were_not_taken_are_not_handed_out_for_a_longer_text() -> None:
    world = Drafting(3)
    for key in range(3):
        world.open(key)
    proposer, keys = world.proposer, list(world.lengths)
    while True:
        world.draft()
        world.verify(behind=True)
        keys = [key for key in world.lengths if world.wanted[key]]
        if len(keys) == len(world.lengths) and proposer.device_drafts(keys) is not None:
            break
    key = keys[0]
    proposer.commit(key, world.lengths[key], [5], K)  # of a step that took none of them
    assert proposer.device_drafts(keys) is None
    drafts = {key: tree.token_ids for key, tree in proposer.draft(keys).drafts}
    follower = proposer._sessions[key].follower
    other = Drafting(3).proposer
    other.open(key, SessionStart(list(follower.tokens), follower.sampling, K, 110))
    assert [drafts[key]] == [tree.token_ids for _, tree in other.draft([key]).drafts]
    proposer.check_invariants()
