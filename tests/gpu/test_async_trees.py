"""Draft trees that stay on the device between captured steps, against the host's way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.config import EngineConfig
from outrider.drafting.building.loops import block_shapes, recurrent_shapes
from outrider.drafting.graphs.loops import LoopCapture, triton_sampler
from outrider.drafting.hidden_states.block_drafter import BlockDrafter
from outrider.drafting.hidden_states.cached_drafter import CachedDrafter
from outrider.drafting.hidden_states.cached_proposer import CachedHeadProposer
from outrider.drafting.hidden_states.heads.block import BlockHead
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import ProposerLimits
from outrider.engine.cuda.sampling import choose_and_verify
from outrider.engine.cuda.trees import place_nodes, walk_nodes
from outrider.engine.engine import Engine
from outrider.engine.graphs.capture import CudaGraphs
from outrider.engine.graphs.decode_buckets import Bucket, make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.decode_inputs import DecodeInputs
from outrider.engine.graphs.tree_inputs import TreeWork
from outrider.engine.hidden_states.streams import MAX_AHEAD_BYTES, HiddenStateStreams
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.features import FeatureSpec
from outrider.policy.base import FixedPolicy
from outrider.types import Request
from tests.support.checkpoints import block_checkpoints as blocks
from tests.support.checkpoints import eagle_checkpoints as eagle
from tests.support.checkpoints.modules import LOADERS
from tests.support.services.drafting_scorer import DraftingScorer, K, draw_requests

pytestmark = pytest.mark.gpu
CUDA, PAGES, PAGE_SIZE, WIDTH = torch.device("cuda"), 60, 16, 3
VOCAB = 6
"""So few that a random module is often right."""
_SIZES = {"head_dim": 64, "vocab_size": VOCAB}  # a head that every kernel has


def target(features: FeatureSpec | None) -> Any:
    """A small Llama with clear winners: kernels differ by the shape of a batch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=eagle.HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **_SIZES,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0.0, 0.35)
    if features is None:
        return model
    options = ModelOptions(
        page_size=PAGE_SIZE,
        num_pages=PAGES,
        features=features,
        attention_backend="triton",
        self_test=False,
    )
    return build_paged_model(model.to(CUDA), options)


def proposer(root: Path, method: str) -> CachedHeadProposer:
    """The method's, on files that are written to `root`."""
    model, folder = target(None), root / "target"
    folder.mkdir(exist_ok=True)
    shared = {
        "model.embed_tokens.weight": model.get_input_embeddings().weight.data,
        "lm_head.weight": model.lm_head.weight.data,
    }
    save_file(shared, folder / "model.safetensors")
    config = {**eagle.LLAMA, **_SIZES, "model_type": "llama", "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    if not (root / method).exists():
        if method == "eagle3":
            tensors = eagle.eagle3_tensors(vocab_size=VOCAB, draft_vocab=None)
            about = {**eagle.LLAMA, **_SIZES, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        else:
            tensors = blocks.dspark_tensors(vocab_size=VOCAB, head_dim=64, draft_vocab=4)
            tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * eagle.HIDDEN_SIZE].contiguous()
            states = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB - 1}
            about = {**blocks.DSPARK, **_SIZES, **states}
        eagle.save_head(root / method, tensors, about, eagle.save_safetensors)
    head = LOADERS[method](root / method, folder, torch.float32, CUDA)
    limits = ProposerLimits(max_sessions=8, max_draft_tokens=K, tree_width=WIDTH)
    pools = KVPools(PAGES, PAGE_SIZE, head.dtype, CUDA)
    backend = choose_backend("triton", head.attention_traits(), CUDA)
    drafter: CachedDrafter
    if isinstance(head, BlockHead):
        sizes = (K, head.max_depth)
        shapes = block_shapes(max_rows=4, limits=sizes, width=WIDTH, num_slots=head.num_slots)
        capture = LoopCapture(shapes, CudaGraphs(), triton_sampler())
        drafter = BlockDrafter(head, pools, backend, limits, capture)
    else:
        shapes = recurrent_shapes(max_rows=4, max_draft_tokens=K, width=WIDTH)
        capture = LoopCapture(shapes, CudaGraphs(), triton_sampler())
        drafter = RecurrentDrafter(head, pools, backend, limits, capture)
    return CachedHeadProposer(drafter, method=method, name=method)


def run(
    requests: list[Request], method: CachedHeadProposer, *, drafts: bool
) -> tuple[int, dict[int, list[int]]]:
    model = target(method.traits.features)
    assert model.pools.features is not None
    runner = DecodeGraphs(
        model,
        [*make_buckets(4, (1, K + 1)), *(Bucket(K + 1, n, True) for n in (1, 2, 4))],
        capture=CudaGraphs(),
        choose_and_verify=choose_and_verify,
        trees=TreeWork(place_nodes, walk_nodes),
    )
    config = EngineConfig(page_size=PAGE_SIZE, num_pages=PAGES, max_num_seqs=4, max_model_len=200)
    streams = HiddenStateStreams(model.pools.features, max_ahead_bytes=MAX_AHEAD_BYTES)
    policy = FixedPolicy(K if drafts else 0, max_wait_s=0.0)
    engine = Engine(model, config, policy=policy, runner=runner, features=streams)
    return DraftingScorer(engine, method if drafts else None).run(requests)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_device_trees_equal_trees_that_host_reads(
    method: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "_HEAD_DIM", 64)
    trees: Counter[str] = Counter()
    take_device_drafts = DecodeInputs.take_device_drafts

    def noted(inputs: DecodeInputs, late: Any, *more: Any) -> None:
        trees["late"] += late.nodes.parents is not None
        take_device_drafts(inputs, late, *more)

    monkeypatch.setattr(DecodeInputs, "take_device_drafts", noted)
    requests = draw_requests(VOCAB, seed)
    num_plain, plain = run(requests, proposer(tmp_path, method), drafts=False)
    num_late, late = run(requests, proposer(tmp_path, method), drafts=True)
    assert late == plain
    assert trees["late"] > num_late / 2
    assert num_late < 0.9 * num_plain
    monkeypatch.setattr(Engine, "schedule_with_device_drafts", lambda *_: False)
    num_read, read = run(requests, proposer(tmp_path, method), drafts=True)
    assert read == plain
    assert abs(num_late - num_read) <= 3, "as many are accepted; near ties and ends of texts apart"
