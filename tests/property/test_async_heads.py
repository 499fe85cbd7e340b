"""Modules that read hidden states draft behind a step what they would draft after it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from outrider.config import EngineConfig
from outrider.draft_port import PostedBlock, StepStates
from outrider.draft_tree import DraftTree
from outrider.drafting.async_drafts import AsyncRow
from outrider.drafting.building.loops import block_shapes, recurrent_shapes
from outrider.drafting.draft_queue import DraftQueue
from outrider.drafting.drafters import AsyncLoop
from outrider.drafting.graphs.loops import CapturedLoops, DraftSampler, LoopCapture
from outrider.drafting.hidden_states.block_drafter import BlockDrafter
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import ProposerLimits, SessionKey, SessionStart
from outrider.engine.engine import Engine
from outrider.engine.graphs.decode_buckets import Bucket, make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.decode_inputs import DecodeInputs
from outrider.engine.hidden_states.streams import MAX_AHEAD_BYTES, HiddenStateStreams
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.runner import Pending, Runner, StepRunner
from outrider.engine.sampling.verify import choose_and_verify
from outrider.engine.step import Step
from outrider.features import FeatureSpec
from outrider.params import SamplingParams
from outrider.policy.base import FixedPolicy, R, Ready
from outrider.types import Request
from tests.support.checkpoints import block_checkpoints as blocks
from tests.support.checkpoints import eagle_checkpoints as eagle
from tests.support.checkpoints.modules import LOADERS
from tests.support.models.by_tensors import by_tensors
from tests.support.models.recordable import rerun, tiny_llama_config
from tests.support.services.drafting_scorer import (
    DraftingScorer,
    DraftListener,
    K,
    draw_requests,
    enqueued,
)

pytestmark = pytest.mark.timeout(400)

VOCAB = 5
"""So few that a random module is often right."""
HIDDEN, LAYERS, MASK = eagle.HIDDEN_SIZE, (0, 1, 2), VOCAB - 1
PAGE_SIZE, PAGES = 4, 120
_SIZES = {"vocab_size": VOCAB}
_GROUP = {"target_layer_ids": [i - 1 for i in LAYERS[1:]], "mask_token_id": MASK}


def _block_tensors(tensors: eagle.Tensors) -> eagle.Tensors:
    """Those of a module that reads two states."""
    return {**tensors, "fc.weight": tensors["fc.weight"][:, : 2 * HIDDEN].contiguous()}


def _modules() -> Mapping[str, tuple[eagle.Tensors, Mapping[str, Any]]]:
    auxiliary = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    llama = {**eagle.LLAMA, **_SIZES}
    peagle = {**blocks.PEAGLE["transformer_layer_config"], **_SIZES}
    return {
        "eagle3": (
            eagle.eagle3_tensors(vocab_size=VOCAB, draft_vocab=None),
            {**llama, **auxiliary},
        ),
        "dflash": (
            _block_tensors(blocks.dflash_tensors(vocab_size=VOCAB)),
            {**blocks.DFLASH, **_SIZES, "dflash_config": _GROUP},
        ),
        "dspark": (
            _block_tensors(blocks.dspark_tensors(vocab_size=VOCAB, markov="rnn", draft_vocab=4)),
            {**blocks.DSPARK_RNN, **_SIZES, **_GROUP},
        ),
        "peagle": (
            blocks.peagle_tensors(vocab_size=VOCAB, draft_vocab=None),
            {
                **blocks.PEAGLE,
                **auxiliary,
                "mask_token_id": MASK,
                "transformer_layer_config": peagle,
            },
        ),
    }


METHODS = ("eagle3", "dflash", "dspark", "peagle")
TREES_ON_DEVICE = ("eagle3", "dspark")
"""Of the others the host makes trees of the candidates at each place."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    target = _target_weights()
    shared = {
        "model.embed_tokens.weight": target.get_input_embeddings().weight.data.float(),
        "lm_head.weight": target.lm_head.weight.data.float(),
    }
    (folder / "target").mkdir()
    save_file(shared, folder / "target" / "model.safetensors")
    config = {**eagle.LLAMA, **_SIZES, "model_type": "llama", "num_hidden_layers": 2}
    (folder / "target" / "config.json").write_text(json.dumps(config))
    for method, (tensors, settings_) in _modules().items():
        eagle.save_head(folder / method, tensors, settings_, eagle.save_safetensors)
    return folder


def _target_weights() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config(vocab_size=VOCAB)).double()


def target(features: FeatureSpec | None, num_pages: int) -> PagedModel:
    model = build_paged_model(
        _target_weights(),
        ModelOptions(page_size=PAGE_SIZE, num_pages=num_pages, features=features, self_test=False),
    )
    model._backend = by_tensors
    return model


def module(folder: Path, method: str, width: int, longest: int | None = None) -> CachedHeadProposer:
    device = torch.device("cpu")
    head = LOADERS[method](folder / method, folder / "target", torch.float64, device)
    limits = ProposerLimits(
        max_sessions=8, max_draft_tokens=K, max_model_len=longest, tree_width=width
    )
    pools = KVPools(PAGES, PAGE_SIZE, head.dtype, device)
    drafter: CachedDrafter
    if isinstance(head, BlockHead):
        assert head.capturable
        sizes = (K, head.max_depth)
        shapes = block_shapes(max_rows=4, limits=sizes, width=width, num_slots=head.num_slots)
        capture = LoopCapture(shapes, rerun, DraftSampler())
        drafter = BlockDrafter(head, pools, by_tensors, limits, capture)
    else:
        shapes = recurrent_shapes(max_rows=4, max_draft_tokens=K, width=width)
        capture = LoopCapture(shapes, rerun, DraftSampler())
        drafter = RecurrentDrafter(head, pools, by_tensors, limits, capture)
    return CachedHeadProposer(drafter, method=method, name=method)


def captured(model: PagedModel) -> StepRunner:
    flat = [*make_buckets(4, (1, K + 1)), *(Bucket(K + 1, 4, False, n) for n in (7, 10))]
    buckets = [*flat, *(Bucket(K + 1, n, True) for n in (1, 2, 4))]
    return DecodeGraphs(model, buckets, capture=rerun, choose_and_verify=choose_and_verify)


class Patient(FixedPolicy):
    """Lets no row run before the drafts of all that wait are there."""

    def choose_rows(
        self, ready: list[R], waiting: Sequence[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        if waiting:
            return Ready([], min(row.drafting.round.deadline for row in waiting))
        return super().choose_rows(ready, waiting, num_prefilling, now)


Aborts = Callable[[DraftingScorer], None]


class Scorer(DraftingScorer):
    """Which forgets requests while drafts are in flight."""

    def __init__(self, engine: Engine, method: CachedHeadProposer | None, aborts: Aborts) -> None:
        super().__init__(engine, method)
        self._aborts, self._method = aborts, method

    def interrupt(self) -> None:
        self._aborts(self)
        if self._method is not None:
            self._method.check_invariants()


def run(
    requests: Sequence[Request],
    method: CachedHeadProposer | None,
    aborts: Aborts = lambda _: None,
    num_pages: int = PAGES,
    max_wait_s: float = 0.0,
) -> tuple[int, dict[int, list[int]]]:
    """Return the number of steps, and the texts. Rows wait `max_wait_s` for each other's drafts."""
    features = None if method is None else method.traits.features
    model = target(features, num_pages)
    streams = None
    if model.pools.features is not None:
        streams = HiddenStateStreams(model.pools.features, max_ahead_bytes=MAX_AHEAD_BYTES)
    config = EngineConfig(
        page_size=PAGE_SIZE, num_pages=num_pages, max_num_seqs=4, max_model_len=100
    )
    policy = Patient(K if method is not None else 0, max_wait_s=max_wait_s)
    engine = Engine(model, config, policy=policy, runner=captured(model), features=streams)
    return Scorer(engine, method, aborts).run(requests)


def counted(monkeypatch: pytest.MonkeyPatch, counts: Counter[str], owner: type, name: str) -> None:
    method = getattr(owner, name)

    def noted(*args: Any) -> Any:
        result = method(*args)
        counts[name] += result is not False and not (name.startswith("launch") and result is None)
        return result

    monkeypatch.setattr(owner, name, noted)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_behind_the_step_are_those_after_it_and_keep_the_text(
    folder: Path, method: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, and rows at T = 1 and below, with and without cuts."""
    counts: Counter[str] = Counter()
    posted: dict[tuple[int, int], DraftTree] = {}
    post_block = Engine.post_block

    def noted(engine: Engine, block: PostedBlock) -> Any:
        posted[block.session_id, block.tree.base_len] = block.tree
        return post_block(engine, block)

    monkeypatch.setattr(Engine, "post_block", noted)
    counted(monkeypatch, counts, CapturedLoops, "launch_after_verify")
    counted(monkeypatch, counts, CapturedLoops, "launch")
    counted(monkeypatch, counts, DecodeInputs, "take_device_drafts")
    requests = draw_requests(VOCAB)
    num_plain, plain = run(requests, None)
    num_late, late = run(requests, module(folder, method, width))
    assert late == plain
    assert num_late < 0.9 * num_plain, "drafts are often right"
    assert counts["launch_after_verify"] > 4 * counts["launch"] > 0, "all but those behind prompts"
    on_device = width == 1 or method in TREES_ON_DEVICE
    assert (counts["take_device_drafts"] > 0.5 * num_late) == on_device
    behind = dict(posted)
    posted.clear()
    counts.clear()
    monkeypatch.setattr(Engine, "verify_output", None)
    assert run(requests, module(folder, method, width)) == (num_late, plain)
    assert counts["launch_after_verify"] == 0 < counts["launch"]
    assert posted == behind


@pytest.mark.parametrize("method", METHODS)
def test_newcomers_and_ends_leave_the_others_drafts_on_the_device(
    folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer's rows are fed beside them, of known prompts, too; a last token needs no draft."""
    counts: Counter[str] = Counter()
    counted(monkeypatch, counts, Engine, "schedule_with_device_drafts")
    monkeypatch.setattr(Runner, "launch", enqueued)
    first, *others = draw_requests(VOCAB)
    known = [replace(each, prompt_token_ids=first.prompt_token_ids) for each in others[::2]]
    requests = [first, *known, *others[1::2]]
    _, plain = run(requests, None)
    num_late, late = run(requests, module(folder, method, 1))
    assert late == plain
    assert counts["schedule_with_device_drafts"] > 0.9 * num_late


@pytest.mark.parametrize("method", METHODS)
def test_drafts_on_the_device_go_into_the_next_step_though_others_would_be_waited_for(
    folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer's first draft is made behind that step: to wait for it would be in vain.

    Nor are hidden states waited for, whose copies end behind the drafts.
    """
    counts: Counter[str] = Counter()
    counted(monkeypatch, counts, Engine, "schedule_with_device_drafts")
    counted(monkeypatch, counts, HiddenStateStreams, "take_colocated")
    launch = DecodeGraphs.launch
    taken: list[int] = []

    def noted(graphs: DecodeGraphs, step: Step) -> Pending:
        if step.device_drafts is not None:
            taken.append(counts["take_colocated"])
        counts["take_colocated"] = 0  # since the last launch
        return launch(graphs, step)

    monkeypatch.setattr(DecodeGraphs, "launch", noted)
    monkeypatch.setattr(Runner, "launch", enqueued)
    requests = draw_requests(VOCAB)
    assert run(requests, module(folder, method, 1), max_wait_s=60.0)[1] == run(requests, None)[1]
    assert len(taken) == counts["schedule_with_device_drafts"] > 0
    assert set(taken) == {1}, "behind the launch before"


@pytest.mark.parametrize("longest", [None, 32])
@pytest.mark.parametrize("method", METHODS)
def test_states_that_loops_read_behind_a_step_do_not_travel(
    folder: Path, method: str, longest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a text lost whose last states the module does not hear of, as it grew too long."""
    counts: Counter[str] = Counter()
    counted(monkeypatch, counts, CachedHeadProposer, "features")
    counted(monkeypatch, counts, HiddenStateStreams, "_slots")
    monkeypatch.setattr(Runner, "launch", enqueued)
    requests = draw_requests(VOCAB)
    num_steps, texts = run(requests, module(folder, method, 1, longest))
    assert texts == run(requests, None)[1]
    if longest is None:
        assert counts["features"] < num_steps / 2, "of newcomers"
        assert counts["_slots"] < num_steps / 2, "of others a step's own slots are read"


def test_longest_draft_of_a_batch_is_posted_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy measures that one; a text that ends soon has a short draft."""
    batches: dict[float | None, list[int]] = {}
    post_block = Engine.post_block

    def noted(engine: Engine, block: PostedBlock) -> Any:
        batches.setdefault(block.arrived_at, []).append(len(block.tree.token_ids))
        return post_block(engine, block)

    monkeypatch.setattr(Engine, "post_block", noted)
    run(draw_requests(VOCAB), module(folder, "eagle3", 1))
    lengths = list(batches.values())
    assert lengths == [sorted(batch, reverse=True) for batch in lengths]
    assert any(batch[-1] < batch[0] for batch in lengths)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**16), width=st.sampled_from((1, 3)))
def test_requests_that_end_while_drafts_are_in_flight_change_no_other_text(
    folder: Path, method: str, seed: int, width: int
) -> None:
    rng = random.Random(seed)
    requests = draw_requests(VOCAB, seed=seed)
    _, plain = run(requests, None)
    gone: set[int] = set()

    def aborts(scorer: DraftingScorer) -> None:
        known = sorted(scorer.texts.keys() - gone)
        if known and rng.random() < 0.06:
            gone.add(session := rng.choice(known))
            scorer.abort(session)

    _, texts = run(requests, module(folder, method, width), aborts)
    for session, text in texts.items():
        assert text == plain[session][: len(text)]
        assert session in gone or len(text) == len(plain[session])


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_that_are_lost_on_the_device_cost_no_token(
    folder: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = draw_requests(VOCAB)
    _, plain = run(requests, None)
    launch_after_verify = CapturedLoops.launch_after_verify
    calls = 0

    def broken(_wanted: Sequence[int]) -> list[Any]:
        raise RuntimeError("the device fell over")

    def failing(*args: Any) -> AsyncLoop[Any] | None:
        nonlocal calls
        loop: AsyncLoop[Any] | None = launch_after_verify(*args)
        calls += loop is not None
        return loop if loop is None or calls != 3 else replace(loop, wait=broken)

    monkeypatch.setattr(CapturedLoops, "launch_after_verify", failing)
    monkeypatch.setattr(DraftListener, "lost", lambda *_: None)
    _, texts = run(requests, module(folder, "dspark", width))
    assert texts == plain
    assert calls >= 3


TEXT = [1, 3, 0, 2, 2, 1, 4, 0, 3]
GREEDY = SamplingParams(temperature=0.0)


def states(proposer: CachedHeadProposer, start: int, end: int) -> torch.Tensor:
    """Made-up states of some positions, of any text."""
    assert proposer.traits.features is not None
    return eagle.features(end, proposer.traits.features.width)[start:]


def alone(folder: Path, method: str, text: list[int]) -> DraftTree:
    """The draft of a proposer that is given all at once."""
    proposer = module(folder, method, 1)
    proposer.open(1, SessionStart(text, GREEDY, K, 60))
    proposer.features(1, 0, eagle.as_bytes(states(proposer, 0, len(text) - 1)))
    ((_, tree),) = proposer.draft([1]).drafts
    return tree


def drafted(folder: Path, method: str) -> CachedHeadProposer:
    """A proposer that has drafted for sessions 1 and 2, both of the same text."""
    proposer = module(folder, method, 1)
    for key in (1, 2):
        proposer.open(key, SessionStart(TEXT, GREEDY, K, 60))
        proposer.features(key, 0, eagle.as_bytes(states(proposer, 0, len(TEXT) - 1)))
    assert len(proposer.draft([1, 2]).drafts) == 2
    return proposer


def launch(proposer: CachedHeadProposer, start: int, end: int) -> bool:
    """Launch behind a step in which two of three tokens are accepted; return whether it could."""
    columns = (1, 2), (1, 1), [start] * 2, [end - start] * 2, (3, 3)  # both read the same
    behind = StepStates(*columns, states(proposer, start - 3, end))
    rows = [AsyncRow(key, key - 1, 3, K, number=key - 1) for key in (1, 2)]
    verify_output = torch.tensor([[2, 4, 1, 0, 3]] * 2, dtype=torch.int32)
    proposer.launch_after_verify(rows, verify_output, behind)
    proposer.check_invariants()
    return proposer._async_drafts.in_flight


def commit(proposer: CachedHeadProposer, fresh: list[int]) -> None:
    length = len(TEXT)
    rows = eagle.as_bytes(states(proposer, length - 1, length - 1 + len(fresh)))
    for key in (1, 2):
        proposer.features(key, length - 1, rows)
        proposer.commit(key, length, fresh, K)


@pytest.mark.parametrize("method", METHODS)
def test_head_launches_only_with_the_states_of_all_that_may_be_accepted(
    folder: Path, method: str
) -> None:
    start = len(TEXT) - 1
    for first, end in ((start - 1, start + 4), (start + 1, start + 4), (start, start + 3)):
        assert not launch(drafted(folder, method), first, end)
    proposer = drafted(folder, method)
    assert launch(proposer, start, start + 4)
    commit(proposer, [4, 1, 0])
    drafts = dict(proposer.draft([1, 2]).drafts)
    assert drafts == dict.fromkeys((1, 2), alone(folder, method, [*TEXT, 4, 1, 0]))


@pytest.mark.parametrize("method", METHODS)
def test_states_that_a_loop_read_are_not_missed(folder: Path, method: str) -> None:
    proposer, length, text = drafted(folder, method), len(TEXT), [*TEXT, 4, 1, 0]
    assert launch(proposer, length - 1, length + 3)
    for key in (1, 2):
        proposer.commit(key, length, text[length:], K)
    drafts = dict(proposer.draft([1, 2]).drafts)
    assert drafts == dict.fromkeys((1, 2), alone(folder, method, text))
    again = dict(proposer.draft([1, 2]).drafts)  # their last states are gone
    assert [tree.token_ids for tree in again.values()] == [(), ()]
    proposer.check_invariants()
    for key in (1, 2):
        rows = states(proposer, len(text) - 1, len(text) + 1)
        proposer.features(key, len(text) - 1, eagle.as_bytes(rows))
        proposer.commit(key, len(text), [2, 3], K)
    drafts = dict(proposer.draft([1, 2]).drafts)
    assert drafts == dict.fromkeys((1, 2), alone(folder, method, [*text, 2, 3]))


@pytest.mark.parametrize("method", METHODS)
def test_head_that_is_behind_its_text_launches_nothing(folder: Path, method: str) -> None:
    proposer = drafted(folder, method)
    commit(proposer, [4])  # and nobody asks for a draft
    assert not launch(proposer, len(TEXT), len(TEXT) + 4)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_behind_a_step_without_its_commits_are_made_anew(folder: Path, method: str) -> None:
    proposer, start = drafted(folder, method), len(TEXT) - 1
    assert launch(proposer, start, start + 4)
    proposer.commit(2, len(TEXT), [VOCAB], K)  # no token: nothing is drafted any more
    drafts = dict(proposer.draft([1, 2]).drafts)
    proposer.check_invariants()
    assert drafts[1] == alone(folder, method, TEXT)
    assert drafts[2].token_ids == ()


def test_text_that_is_aborted_within_its_prompt_is_not_opened_without_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hidden states may come after the abort, and before it is closed."""
    opened: list[int] = []
    open_ = DraftQueue.open

    def noted(queue: DraftQueue, key: SessionKey, start: SessionStart) -> None:
        opened.append(len(start.prefix))
        open_(queue, key, start)

    monkeypatch.setattr(DraftQueue, "open", noted)
    method = module(folder, "eagle3", 1)
    model = target(method.traits.features, PAGES)
    assert model.pools.features is not None
    config = EngineConfig(
        page_size=PAGE_SIZE, num_pages=PAGES, max_model_len=100, max_num_batched_tokens=8
    )
    streams = HiddenStateStreams(model.pools.features)
    policy = FixedPolicy(K, max_wait_s=0.0)
    engine = Engine(model, config, policy=policy, runner=captured(model), features=streams)
    scorer = Scorer(engine, method, lambda _: None)
    scorer.begin(Request(0, tuple(range(VOCAB)) * 11, SamplingParams(temperature=0.0)))
    scorer.step()
    engine.abort(0)
    scorer.step()
    assert scorer._colocated is not None
    scorer._colocated.close(0)
    assert not opened
