"""Captured loops of block drafters equal eager rounds, whatever fills up their rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.building.loops import block_shapes
from outrider.drafting.graphs.loop_inputs import LoopShape
from outrider.drafting.graphs.loops import DraftSampler, LoopCapture
from outrider.drafting.hidden_states.block_drafter import BlockDrafter
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.heads.dspark import DSparkHead
from outrider.drafting.proposer import ProposerLimits, SessionStart
from outrider.engine.graphs.capture import Capture
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from tests.support.checkpoints import block_checkpoints as blocks
from tests.support.checkpoints import eagle_checkpoints as eagle
from tests.support.checkpoints.loading import load_dflash, load_dspark, load_peagle
from tests.support.models.recordable import (
    Counted,
    MetaAttention,
    launch_without_waiting,
    rerun_strictly,
    run_each,
)
from tests.unit.graphs.test_recurrent_loops import MAX_LEN, PAGE_SIZE, SAMPLINGS, Said

CPU = torch.device("cpu")
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
}
Load = Callable[..., BlockHead]
KINDS: Mapping[str, tuple[Load, eagle.Tensors, dict[str, Any]]] = {
    "dflash": (load_dflash, blocks.dflash_tensors(), {**blocks.DFLASH, **SLIDING}),
    "dspark": (load_dspark, blocks.dspark_tensors(draft_vocab=40), {**blocks.DSPARK, **SLIDING}),
    "dspark rnn": (load_dspark, blocks.dspark_tensors(markov="rnn"), blocks.DSPARK_RNN),
    "peagle": (load_peagle, blocks.peagle_tensors(), blocks.PEAGLE),
}


def load(kind: str, folder: Path, device: torch.device, **settings: Any) -> BlockHead:
    loader, tensors, config = KINDS[kind]
    if not folder.exists():
        eagle.save_target(folder / "target")
        eagle.save_head(folder / "head", tensors, config | settings)
    return loader(folder / "head", folder / "target", torch.float64, device)


def proposer_of(head: BlockHead, tree_width: int, capture: Capture | None) -> CachedHeadProposer:
    shapes = [
        LoopShape(rows, query_len, k, cut=cut, width=tree_width, slots=head.num_slots(k))
        for rows, query_len, cut in itertools.product((1, 3), (2, 6), (False, True))
        for k in range(1, 6)
    ]
    drafter = BlockDrafter(
        head,
        KVPools(200 + (capture is not None), PAGE_SIZE, head.dtype, CPU),
        choose_backend("sdpa", head.attention_traits(), CPU),
        ProposerLimits(
            max_model_len=MAX_LEN,
            max_draft_tokens=6,  # one more than loops have
            prefill_budget=20,
            tree_width=tree_width,
        ),
        None
        if capture is None
        else LoopCapture(shapes, capture, DraftSampler(), precompile=run_each),
    )
    return CachedHeadProposer(drafter, method="dflash", name="tiny")


@pytest.mark.parametrize(("tree_width", "seed"), [(1, 1), (4, 4), (4, 5), (4, 6), (4, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_block_drafts_for_any_rows_equal_eager_drafts(
    kind: str, tree_width: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With causal layers, in which slots that a row does not want change nothing.

    Without the text, which captured loops do not have.
    """
    monkeypatch.setattr(DSparkHead, "follows_paths", False)
    counted = Counted()
    eager, captured = (
        Said(proposer_of(head, tree_width, record), head.features.width, seed=seed)
        for record in (None, counted)
        for head in [load(kind, tmp_path / "files", CPU, causal=True)]
    )
    assert captured.drafts == eager.drafts
    assert sum(len(tree.token_ids) for _, tree in eager.drafts) > 60
    assert counted.repeated > 10


def test_trees_of_dspark_follow_the_text_where_they_are_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drafts(record: Capture | None) -> list[Any]:
        head = load("dspark", tmp_path / "files", CPU, causal=True)
        return Said(proposer_of(head, 4, record), head.features.width, seed=6).drafts

    with_text, captured = drafts(None), drafts(Counted())
    monkeypatch.setattr(DSparkHead, "follows_paths", False)
    assert drafts(None) == captured
    assert with_text != captured


@pytest.mark.parametrize("tree_width", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_block_drafts_of_one_row_equal_eager_drafts(
    kind: str, tree_width: int, tmp_path: Path
) -> None:
    """With a loop for each number of slots, which all see one another."""
    counted = Counted()
    found = []
    for record in (None, counted):
        head = load(kind, tmp_path / "files", CPU)
        proposer = proposer_of(head, tree_width, record)
        text, drafts = list(range(1, 8)), []
        proposer.open(1, SessionStart(text, SAMPLINGS[1], 3, MAX_LEN))
        proposer.features(1, 0, eagle.as_bytes(eagle.features(6, head.features.width)))
        for k in (3, 5, 1, 4, 2, 5):
            ((_, tree),) = proposer.draft([1]).drafts
            drafts.append(tree)
            fresh = [k, 40 + k]
            rows = eagle.features(2, head.features.width, seed=k)
            proposer.features(1, len(text) - 1, eagle.as_bytes(rows))
            proposer.commit(1, len(text), fresh, k)
            text += fresh
        found.append(drafts)
    assert found[0] == found[1]
    assert counted.repeated >= 5


@pytest.mark.parametrize("tree_width", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_block_loop_under_capture_and_its_launch_never_wait_for_device(
    kind: str, tree_width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("meta")
    head = load(kind, tmp_path / "files", device)
    assert head.capturable
    shapes = [
        LoopShape(2, 3, 4, cut=cut, width=tree_width, slots=head.num_slots(4))
        for cut in (False, True)
    ]
    drafter = BlockDrafter(
        head,
        KVPools(20, PAGE_SIZE, head.dtype, device),
        MetaAttention,
        ProposerLimits(max_model_len=MAX_LEN, max_draft_tokens=4, tree_width=tree_width),
        LoopCapture(shapes, rerun_strictly, DraftSampler()),
    )
    loop = launch_without_waiting(drafter, monkeypatch)
    assert loop is not None
    if tree_width > 1 and not head.follows_paths:
        assert loop.nodes is None
        return
    assert loop.nodes is not None
    assert loop.nodes.tokens.shape == (2, 3)
    assert (loop.nodes.parents is None) == (tree_width == 1)


def test_block_head_with_windows_that_are_not_causal_is_not_captured(tmp_path: Path) -> None:
    assert not load("dflash", tmp_path / "files", CPU, is_causal=False).capturable


def test_dspark_drafts_for_many_rows_in_one_loop_whatever_the_targets_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots have logits of known tokens alone: 64 rows are not parts of 16, one by one."""
    head = load("dspark", tmp_path / "files", CPU)
    monkeypatch.setattr(head, "vocab_size", 128_256)
    monkeypatch.setattr(head, "_num_known", 32_000)
    assert head.max_rows(depth=7, width=1) >= 128
    assert 16 < head.max_rows(depth=16, width=8) <= 32, "trees with cuts take the whole vocabulary"


@pytest.mark.parametrize("depth", [3, 7, 15])
@pytest.mark.parametrize("most", [1, 5, 16])
@pytest.mark.parametrize("max_rows", [1, 5, 256])
def test_block_shapes_for_any_limits_fit_all_rounds(max_rows: int, most: int, depth: int) -> None:
    shapes = block_shapes(
        max_rows=max_rows, limits=(most, depth), width=8, num_slots=lambda k: k + 1
    )
    assert len(shapes) == len(set(shapes))
    for k in range(1, most + 1):
        deep = min(k, depth)
        assert any(
            shape.rows >= max_rows
            and shape.query_len > deep
            and shape.num_tokens >= k
            and shape.slots > deep
            for shape in shapes
            if not shape.cut
        )
