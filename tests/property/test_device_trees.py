"""Trees that stay on the device are verified as the same trees from the host are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.draft_port import DeviceDrafts, DeviceNodes, DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree, chain_parents
from outrider.engine.engine import Engine
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.decode_inputs import DecodeInputs
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import ScheduledRow, Step, StepResult
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.params import SamplingParams, StopParams
from outrider.policy.base import FixedPolicy
from outrider.rounds import BlockFate
from outrider.types import Request, StepEvents, VerifiedDraft
from tests.property import test_async_heads as heads
from tests.property.test_async_heads import VOCAB, counted, module
from tests.support.models.hash_model import HashModel
from tests.support.services.drafting_scorer import EDITED, SAMPLINGS, enqueued
from tests.unit.graphs import test_decode_graphs as steps_
from tests.unit.graphs.test_decode_graphs import kept_keys, make_step, with_true_drafts

pytestmark = pytest.mark.timeout(400)
folder, graphs, model = heads.folder, steps_.graphs, steps_.model


def any_step(rng: random.Random, num_drafts: Sequence[int], vocab: int, runner: Runner) -> Step:
    """A step of trees, partly right, and of rows without drafts that may be sampled eagerly."""
    rows: list[ScheduledRow] = []
    for i, row in enumerate(make_step(rng, [*num_drafts], vocab, trees=True).rows):
        row.seq.session_id = i
        if row.seq.needs_eager_sampling:
            first = row.slice._replace(token_ids=row.slice.token_ids[:1], num_logits=1, parents=())
            row = row._replace(slice=first, draft=())
        rows.append(row)
    step = Step(tuple(rows), sum(len(row.slice.token_ids) for row in rows))
    return with_true_drafts(step, runner, rng)


def left_on_device(step: Step, rng: random.Random) -> Step:
    """The same step, in which the host holds places for the drafts."""
    drafted = [row for row in step.rows if row.draft]
    most = max(len(row.draft) for row in drafted)
    shape = (len(drafted) + 1, most + rng.randint(0, 2))
    tokens, parents = torch.randint(97, shape, dtype=torch.int32), torch.zeros(shape).int() - 1
    order = rng.sample(range(shape[0]), len(drafted))
    for place, row in zip(order, drafted, strict=True):
        size = len(row.draft)
        tokens[place, :size] = torch.tensor(row.draft)
        parents[place, :size] = torch.tensor(row.slice.parents or chain_parents(size))
    rows = []
    for row in step.rows:
        held = (0,) * len(row.draft)
        part = row.slice._replace(token_ids=(row.slice.token_ids[0], *held), parents=())
        rows.append(row._replace(slice=part, draft=held))
    places = {row.seq.session_id: place for row, place in zip(drafted, order, strict=True)}
    lengths = {row.seq.session_id: len(row.draft) for row in drafted}
    drafts = DeviceDrafts(DeviceNodes(tokens, parents), places, lengths)
    return replace(step, others=tuple(rows), device_drafts=drafts)


def outcome(model: PagedModel, step: Step, result: StepResult) -> tuple[Any, Any]:
    """Return what counts of a result, and what is left behind of the texts."""
    ends = [n + 1 for n in result.accepted]
    chosen = [list(row[:end]) for row, end in zip(result.choices, ends, strict=True)]
    return chosen, kept_keys(model, step, result)


@settings(
    max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(num_drafts=st.lists(st.integers(1, 8), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_step_with_trees_on_device_does_as_with_those_of_host(
    model: PagedModel, graphs: DecodeGraphs, num_drafts: list[int], seed: int
) -> None:
    """Its results, and the keys and values that it moves."""
    rng, eager = random.Random(seed), Runner(model)
    step = any_step(rng, num_drafts, model.vocab_size, eager)
    if not any(row.draft for row in step.rows):
        return
    late = left_on_device(step, rng)
    assert graphs._fit(late) is not None
    expected, kept = outcome(model, step, eager.launch(step).wait())
    for runner in (graphs, eager):
        chosen, left = outcome(model, step, runner.launch(late).wait())
        assert chosen == expected
        torch.testing.assert_close(left, kept)


def draw_requests(rng: random.Random) -> list[Request]:
    """Some that end within a tree, go on from others' texts, or are sampled eagerly."""
    firsts = [
        Request(
            i,
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(2, 20))),
            sampling,
            StopParams(max_tokens=rng.randint(30, 60)),
        )
        for i, sampling in enumerate(rng.sample(SAMPLINGS, 3))
    ]
    _, texts = heads.run(firsts, None)
    others: list[Request] = []
    for first in firsts:
        text = texts[first.session_id]
        rare = max(set(text), key=text.index)
        size = rng.randint(1, 30)
        prompt = (*first.prompt_token_ids, *text[:size])
        others += [
            replace(first, stop=replace(first.stop, stop_token_ids=frozenset({rare}))),
            replace(first, stop=StopParams(max_tokens=rng.randint(1, 25))),
            replace(first, prompt_token_ids=prompt, stop=StopParams(max_tokens=20)),
            replace(first, draft_trees=True),
        ]
    edited = replace(others[0], sampling=EDITED, stop=StopParams(max_tokens=10))
    shown = replace(others[1], top_logprobs=2, stop=StopParams(max_tokens=10))
    others = rng.sample([*others, edited, shown], len(others) + 2)
    return [*firsts, *(replace(each, session_id=3 + i) for i, each in enumerate(others))]


Shown = dict[tuple[int, int], VerifiedDraft]
"""Drafts that requests are shown, by session and committed tokens."""


@pytest.mark.parametrize("method", heads.TREES_ON_DEVICE)
def test_engine_with_trees_on_device_emits_plain_text_of_any_requests(
    folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device steps with prompts are enqueued at once; few pages are left for all rows."""
    counts: Counter[str] = Counter()
    shown: Shown = {}
    finalize_step, preempt = Engine.finalize_step, Scheduler._preempt
    with_trees_read = Step.with_trees_read

    def finalized(engine: Engine) -> StepEvents | None:
        events = finalize_step(engine)
        for commit in () if events is None else events.commits:
            if commit.draft is not None:
                shown[commit.session_id, commit.base_len] = commit.draft
        return events

    def preempted(*args: Any) -> None:
        counts["preempted"] += 1
        preempt(*args)

    def read(step: Step) -> Step:
        known = with_trees_read(step)
        kind = "beside prompts" if step.has_prompts else "sampled eagerly"
        counts[kind] += known is not step
        return known

    monkeypatch.setattr(Engine, "finalize_step", finalized)
    monkeypatch.setattr(Scheduler, "_preempt", preempted)
    monkeypatch.setattr(Step, "with_trees_read", read)
    monkeypatch.setattr(Runner, "launch", enqueued)
    counted(monkeypatch, counts, DecodeInputs, "take_device_drafts")
    steps = in_both = bushy = 0
    for seed in range(4):
        requests = draw_requests(random.Random(seed))
        _, plain = heads.run(requests, None)
        number, texts = heads.run(requests, module(folder, method, 3), num_pages=28)
        assert texts == plain, seed
        steps += number
        late = shown.copy()
        shown.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "schedule_with_device_drafts", lambda *_: False)
            assert heads.run(requests, module(folder, method, 3), num_pages=28)[1] == plain
        for place in late.keys() & shown.keys():
            nodes = len(late[place].token_ids)  # fewer where a text nears its end
            known = DraftTree(0, shown[place].token_ids, shown[place].parents).at_most(nodes)
            assert late[place].token_ids == known.token_ids
            assert late[place].parents in (known.parents, ())
            in_both, bushy = in_both + 1, bushy + bool(late[place].parents)
        shown.clear()
    assert counts["take_device_drafts"] > 0.5 * steps
    assert in_both > bushy > 20
    for kind in ("preempted", "beside prompts", "sampled eagerly"):
        assert counts[kind] > 5, kind


def make_engine(max_tokens: int, k: int = 4) -> Engine:
    """One with a request whose first token is known."""
    config = EngineConfig(page_size=4, num_pages=64, max_model_len=256, num_speculative_tokens=k)
    policy = FixedPolicy(k, max_wait_s=1.0)
    engine = Engine(HashModel(max_model_len=256), config, policy=policy)
    stop = StopParams(max_tokens=max_tokens)
    greedy = SamplingParams(temperature=0.0)
    engine.submit(Request(0, (1, 2, 3), greedy, stop, draft_trees=True))
    engine.set_drafting(0, DraftOffer("here", k, colocated=True))
    engine.step()
    return engine


def test_device_trees_that_no_step_verifies_were_not_awaited_in_vain() -> None:
    """A text's last token needs no draft."""
    engine = make_engine(max_tokens=2)
    nodes = DeviceNodes(*torch.tensor([[[1, 2, 3, 4]], [[-1, 0, 0, 1]]], dtype=torch.int32))
    assert engine.schedule_with_device_drafts(DeviceDrafts(nodes, {0: 0}, {0: 4}))
    assert engine.launch()
    engine.finalize_step()
    assert not engine._tracker._in_vain


def test_posted_tree_of_fewer_nodes_takes_the_place_that_was_held() -> None:
    """Copies fill up what the device verifies, and nobody is told of these."""
    plain, engine = make_engine(max_tokens=9), make_engine(max_tokens=9)
    plain.abort(0)
    plain.submit(Request(1, (1, 2, 3), SamplingParams(temperature=0.0), StopParams(max_tokens=9)))
    for _ in range(4):
        plain.step()
    *text, first, second, _ = plain.committed(1) or ()
    wrong = 31 - first
    tokens = torch.tensor([[wrong, first, second, wrong]], dtype=torch.int32)
    nodes = DeviceNodes(tokens, torch.tensor([[-1, -1, 1, -1]], dtype=torch.int32))
    assert engine.schedule_with_device_drafts(DeviceDrafts(nodes, {0: 0}, {0: 4}))
    assert engine.launch()
    tree = DraftTree(len(text), (wrong, first, second), (-1, -1, 1))
    assert engine.post_block(PostedBlock(0, tree, "here", 5)) is BlockFate.USEFUL
    engine.check_invariants()
    engine.collect()
    events = engine.finalize_step()
    assert events is not None
    [commit] = events.commits
    assert engine.committed(0) == plain.committed(1)
    assert commit.draft == VerifiedDraft(len(text), tree.token_ids, tree.parents)


def test_device_trees_of_more_nodes_than_a_mask_has_bits_are_cut() -> None:
    """The host's are, too, when they are chosen for a step."""
    engine, text = make_engine(max_tokens=150, k=80), HashModel().greedy_text((1, 2, 3), 60)
    path = text[1:41]  # the first token is known
    drafted = [token for right in path for token in (31 - right, right)]  # two nodes per level
    parents = [2 * (i // 2) - 1 for i in range(80)]
    nodes = DeviceNodes(*torch.tensor([[drafted], [parents]], dtype=torch.int32))
    assert engine.schedule_with_device_drafts(DeviceDrafts(nodes, {0: 0}, {0: 80}))
    assert engine.launch()
    engine.collect()
    events = engine.finalize_step()
    assert events is not None
    assert not events.failures
    assert engine.committed(0) == (1, 2, 3, *text[: MAX_TREE_NODES // 2 + 2])
