"""Draft modules on a device: the drafts of a CPU, from the same states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.draft_tree import DraftTree
from outrider.drafting.building.loops import block_shapes, one_shot_shapes, recurrent_shapes
from outrider.drafting.drafters import DraftInput, features_on
from outrider.drafting.graphs.loops import LoopCapture, triton_sampler
from outrider.drafting.hidden_states.block_drafter import BlockDrafter
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.heads.base import RecurrentHead
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.batch import RowSlice
from outrider.engine.graphs.capture import CudaGraphs, Work
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.params import SamplingParams
from tests.support.checkpoints import block_checkpoints as blocks
from tests.support.checkpoints import eagle_checkpoints as made
from tests.support.checkpoints import one_shot_drafts
from tests.support.checkpoints.loading import (
    load_dflash,
    load_dspark,
    load_eagle,
    load_eagle3,
    load_peagle,
)

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PAGE_SIZE, ROUNDS = 16, 8


KINDS = ("eagle", "eagle3", "dflash", "dspark", "dspark-rnn", "peagle")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(made, "_HEAD_DIM", 64)  # that every kernel has
    config = {**made.LLAMA, "head_dim": 64}
    made.save_target(tmp_path / "target")
    made.save_head(tmp_path / "eagle", made.eagle_tensors(), config)
    made.save_head(tmp_path / "eagle3", made.eagle3_tensors(), config)
    slides = {"layer_types": ["full_attention", *["sliding_attention"] * 2], "sliding_window": 32}
    dflash = {**blocks.DFLASH, **slides, "head_dim": 64}
    made.save_head(tmp_path / "dflash", blocks.dflash_tensors(head_dim=64), dflash)
    dspark = {**blocks.DSPARK, "head_dim": 64}
    made.save_head(tmp_path / "dspark", blocks.dspark_tensors(head_dim=64), dspark)
    rnn = {**blocks.DSPARK_RNN, "head_dim": 64}
    made.save_head(tmp_path / "dspark-rnn", blocks.dspark_tensors(head_dim=64, markov="rnn"), rnn)
    layers = {**blocks.PEAGLE["transformer_layer_config"], "head_dim": 64}
    peagle = {**blocks.PEAGLE, "transformer_layer_config": layers}
    made.save_head(tmp_path / "peagle", blocks.peagle_tensors(), peagle)
    return str(request.param)


Head = RecurrentHead | BlockHead


def _load(kind: str, folder: Path, dtype: torch.dtype, device: torch.device) -> Head:
    loaders: dict[str, Callable[..., Head]] = {
        **{"eagle": load_eagle, "eagle3": load_eagle3, "peagle": load_peagle},
        **{"dflash": load_dflash, "dspark": load_dspark, "dspark-rnn": load_dspark},
    }
    head: Head = loaders[kind](folder / kind, folder / "target", dtype, device)
    return head


def _proposer(
    head: Head, tree_width: int, capture: LoopCapture | None = None
) -> CachedHeadProposer:
    pools = KVPools(65, PAGE_SIZE, head.dtype, head.device)
    backend = choose_backend(None, head.attention_traits(), head.device)
    limits = ProposerLimits(prefill_budget=40, tree_width=tree_width)
    drafter: CachedDrafter
    if isinstance(head, BlockHead):
        drafter = BlockDrafter(head, pools, backend, limits, capture)
    else:
        drafter = RecurrentDrafter(head, pools, backend, limits, capture)
    return CachedHeadProposer(drafter, method="eagle", name="tiny")


def _drafts(
    head: Head,
    sampling: SamplingParams,
    tree_width: int,
    capture: LoopCapture | None = None,
) -> list[DraftTree]:
    """Those of two sessions over some rounds, whose texts do not depend on what is drafted."""
    proposer, width = _proposer(head, tree_width, capture), head.features.width
    lengths = {1: 60, 2: 9}
    for key, length in lengths.items():
        proposer.open(key, SessionStart([key + i % 90 for i in range(length)], sampling, 6, 120))
        proposer.features(key, 0, made.as_bytes(made.features(length - 1, width, key)))
    found: list[DraftTree] = []
    for i in range(ROUNDS):
        trees: dict[int, DraftTree] = {}
        while len(trees) < 2:
            done = proposer.draft([key for key in lengths if key not in trees])
            assert not done.lost
            trees.update(done.drafts)
        found += [trees[1], trees[2]]
        for key, length in lengths.items():
            rows = made.features(3, width, 10 * i + key)
            proposer.features(key, length - 1, made.as_bytes(rows))
            proposer.commit(key, length, [i, key, 40 + i], 6)
            lengths[key] = length + 3
    proposer.check_invariants()
    return found


def _alike(a: DraftTree, b: DraftTree) -> bool:
    """Return whether these are the same nodes, of like confidences if both tell any."""
    told = zip(a.confidences, b.confidences, strict=True) if a.confidences and b.confidences else ()
    same = a._replace(confidences=b"") == b._replace(confidences=b"")
    return same and all(abs(one - other) <= 2 for one, other in told)


def _step_in_flight() -> torch.cuda.Event:
    """Return the end of work that takes longer than the host's."""
    torch.cuda._sleep(2**31)
    ended = torch.cuda.Event()
    ended.record()
    return ended


def test_prompts_are_fed_while_a_step_is_in_flight(kind: str, tmp_path: Path) -> None:
    """The first prompt compiles kernels."""
    proposer = _proposer(_load(kind, tmp_path, torch.bfloat16, CUDA), tree_width=1)
    for key in (1, 2):
        text = [key + i % 90 for i in range(60)]
        proposer.open(key, SessionStart(text, SamplingParams(temperature=0.0), 6, 120))
        states = made.features(59, proposer.traits.features.width, key)
        proposer.features(key, 0, made.as_bytes(states))
        torch.cuda.synchronize()
        ended = _step_in_flight()
        assert proposer.draft([key]).unfinished == [key], "a part of it"
    assert not ended.query()


def test_hidden_states_are_sent_while_a_step_is_in_flight() -> None:
    parts = [torch.randn(n, 4096).bfloat16() for n in (300, 7)]
    rows = [
        DraftInput(RowSlice((0,) * len(part), 0, [], 1), 0, SamplingParams(), features=part)
        for part in parts
    ]
    features_on(CUDA, rows)  # which reserves the memory
    torch.cuda.synchronize()
    ended = _step_in_flight()
    sent = features_on(CUDA, rows)
    assert not ended.query()
    assert torch.equal(sent.cpu(), torch.cat(parts))


@pytest.mark.parametrize("tree_width", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recurrent_drafts_on_gpu_equal_those_of_cpu(
    kind: str, tmp_path: Path, temperature: float, tree_width: int
) -> None:
    """In float32, but for near ties; in bfloat16 most of what comes first."""
    sampling = SamplingParams(temperature=temperature, seed=5)
    expected = _drafts(_load(kind, tmp_path, torch.float32, CPU), sampling, tree_width)
    for dtype, least in ((torch.float32, 0.9), (torch.bfloat16, 0.5)):
        found = _drafts(_load(kind, tmp_path, dtype, CUDA), sampling, tree_width)
        same = [a.token_ids[:1] == b.token_ids[:1] for a, b in zip(found, expected, strict=True)]
        assert sum(same) >= least * len(same), dtype
        if dtype is torch.float32:
            whole = [_alike(a, b) for a, b in zip(found, expected, strict=True)]
            assert sum(whole) >= 0.75 * len(whole)


class Counted:
    """`CudaGraphs`, counting replays."""

    def __init__(self) -> None:
        self._graphs = CudaGraphs()
        self.replayed = 0

    def __call__(self, work: Work) -> Work:
        replay = self._graphs(work)

        def counted() -> None:
            self.replayed += 1
            replay()

        return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", one_shot_drafts.HEADS)
@pytest.mark.parametrize("tree_width", [1, 4])
def test_captured_one_shot_drafts_equal_eager_drafts(
    name: str, tree_width: int, dtype: torch.dtype
) -> None:
    """But for near ties: their first nodes, which matter most, are the same."""
    counted = Counted()
    shapes = one_shot_shapes(max_rows=4, max_depth=one_shot_drafts.DEPTH)
    head = one_shot_drafts.HEADS[name](dtype, CUDA)
    eager = one_shot_drafts.drafts(head, tree_width, None)
    capture = LoopCapture(shapes, counted, triton_sampler())
    found = one_shot_drafts.drafts(head, tree_width, capture)
    same = [a.token_ids[:1] == b.token_ids[:1] for a, b in zip(found, eager, strict=True)]
    assert sum(same) >= 0.9 * len(same)
    if dtype is torch.float32:
        assert sum(_alike(a, b) for a, b in zip(found, eager, strict=True)) >= 0.9 * len(same)
    assert counted.replayed > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0, seed=6, top_k=12, top_p=0.9),
    ],
)
@pytest.mark.parametrize("tree_width", [1, 4])
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_captured_recurrent_drafts_equal_eager_drafts(
    kind: str, tmp_path: Path, tree_width: int, dtype: torch.dtype, sampling: SamplingParams
) -> None:
    """But for near ties: products round by the shape of a batch."""
    shapes = recurrent_shapes(max_rows=4, max_draft_tokens=6, width=tree_width)
    head = _load(kind, tmp_path, dtype, CUDA)
    if isinstance(head, BlockHead):
        assert head.capturable
        limits, slots = (6, head.max_depth), head.num_slots
        shapes = block_shapes(max_rows=4, limits=limits, width=tree_width, num_slots=slots)
    counted = Counted()
    capture = LoopCapture(shapes, counted, triton_sampler())
    eager = _drafts(head, sampling, tree_width)
    found = _drafts(_load(kind, tmp_path, dtype, CUDA), sampling, tree_width, capture)
    same = [a.token_ids[:1] == b.token_ids[:1] for a, b in zip(found, eager, strict=True)]
    assert sum(same) >= 0.8 * len(same)
    if dtype is torch.float32:
        assert sum(_alike(a, b) for a, b in zip(found, eager, strict=True)) >= 0.8 * len(eager)
    if tree_width > 1:
        assert all(each.confidences for each in found if len(each.token_ids) > 1)
    assert counted.replayed >= ROUNDS - 1
