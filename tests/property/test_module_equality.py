"""A module that drafts from hidden states changes no text: not with streams that break, sessions
that are opened anew and replayed, rejected drafts, preemptions and shared prefixes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from outrider.draft_tree import DraftTree
from outrider.drafting.building.config import HeadConfig
from outrider.drafting.building.heads import build_head
from outrider.drafting.proposer import (
    NO_PACE,
    DraftRound,
    FeatureProposer,
    Pace,
    SessionKey,
)
from tests.support.checkpoints import block_checkpoints as blocks
from tests.support.checkpoints import eagle_checkpoints as eagle
from tests.support.models.features import CAPTURED, NUM_LAYERS, SIZE
from tests.support.simulators.feature_world import feature_world, run_random_requests
from tests.support.simulators.methods import VOCAB, Clock, Net

pytestmark = pytest.mark.timeout(400)

_SIZES = {"hidden_size": SIZE, "vocab_size": VOCAB}


def _dflash() -> tuple[eagle.Tensors, Mapping[str, Any]]:
    group = {"target_layer_ids": [i - 1 for i in CAPTURED.layers], "mask_token_id": VOCAB - 1}
    return (
        blocks.dflash_tensors(hidden=SIZE, vocab_size=VOCAB),
        {**blocks.DFLASH, **_SIZES, "dflash_config": group},
    )


def _dspark() -> tuple[eagle.Tensors, Mapping[str, Any]]:
    settings = {
        "target_layer_ids": [i - 1 for i in CAPTURED.layers],
        "mask_token_id": VOCAB - 1,
    }
    return (
        blocks.dspark_tensors(hidden=SIZE, vocab_size=VOCAB),
        {**blocks.DSPARK, **_SIZES, **settings},
    )


def _peagle() -> tuple[eagle.Tensors, Mapping[str, Any]]:
    layers = {"eagle_aux_hidden_state_layer_ids": list(CAPTURED.layers)}
    settings = {**blocks.PEAGLE["transformer_layer_config"], **_SIZES}
    return (
        blocks.peagle_tensors(hidden=SIZE, vocab_size=VOCAB, draft_vocab=None),
        {
            **blocks.PEAGLE,
            **layers,
            "mask_token_id": VOCAB - 1,
            "transformer_layer_config": settings,
        },
    )


def _eagle3() -> tuple[eagle.Tensors, Mapping[str, Any]]:
    tensors = eagle.eagle3_tensors(
        hidden_size=SIZE, target_hidden=SIZE, vocab_size=VOCAB, draft_vocab=None
    )
    layers = {"eagle_aux_hidden_state_layer_ids": list(CAPTURED.layers)}
    return tensors, {**eagle.LLAMA, **_SIZES, **layers}


MODULES: Mapping[str, Callable[[], tuple[eagle.Tensors, Mapping[str, Any]]]] = {
    "dflash": _dflash,
    "dspark": _dspark,
    "peagle": _peagle,
    "eagle3": _eagle3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    shared = {"model.embed_tokens.weight": torch.randn(VOCAB, SIZE)}
    (folder / "target").mkdir()
    save_file(shared, folder / "target" / "model.safetensors")
    config = {"model_type": "llama", "num_hidden_layers": NUM_LAYERS, **_SIZES}
    (folder / "target" / "config.json").write_text(json.dumps(config))
    for method, make in MODULES.items():
        eagle.save_head(folder / method, *make(), eagle.save_safetensors)
    return folder


def _proposer(folder: Path, method: str, tree_width: int) -> FeatureProposer:
    config = HeadConfig(
        name=method,
        model=str(folder / method),
        target_model=str(folder / "target"),
        dtype="float32",
        kv_cache_memory=4,
        max_draft_tokens=8,
        tree_width=tree_width,
    )
    return build_head(config, 64, 32, lambda _: None)[0]


@pytest.mark.parametrize("method", MODULES)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**16),
    k=st.integers(1, 6),
    tree_width=st.sampled_from((1, 3)),
    budget=st.sampled_from((4, 64)),
    net=st.sampled_from(
        (Net(), Net(break_chance=0.05), Net(stall_chance=0.2, stall_s=0.05, break_chance=0.02))
    ),
)
def test_module_under_any_schedule_keeps_the_text(
    folder: Path, method: str, seed: int, k: int, tree_width: int, budget: int, net: Net
) -> None:
    world = feature_world(random.Random(seed), k, (0.003, 0.02), budget)
    proposer = _proposer(folder, method, tree_width)
    drafts: list[DraftTree] = []

    def counted(sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        done = type(proposer).draft(proposer, sessions, pace)
        drafts.extend(tree for _, tree in done.drafts)
        return done

    proposer.draft = counted  # type: ignore[method-assign]
    world.add((proposer, Clock()), net)
    run_random_requests(world)
    if net == Net():
        longest = max(len(text) for text in world.committed.values())
        assert any(tree.token_ids for tree in drafts) or longest < 4
    proposer.check_invariants()  # type: ignore[attr-defined]
