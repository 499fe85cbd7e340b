"""Prediction heads on a device: the outputs of a CPU, for rows, trees and their own states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.drafting.building.loops import recurrent_shapes
from outrider.drafting.drafters import DraftInput
from outrider.drafting.graphs.loops import LoopCapture, triton_sampler
from outrider.drafting.hidden_states.recurrent_drafter import RecurrentDrafter
from outrider.drafting.proposer import ProposerLimits
from outrider.engine.batch import RowSlice, pack
from outrider.engine.graphs.capture import CudaGraphs
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import choose_backend
from outrider.params import SamplingParams
from tests.support.checkpoints import mtp_checkpoints as made
from tests.support.checkpoints.loading import load_mtp

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PAGE_SIZE = 16
CASES: dict[str, Callable[[], made.MtpCheckpoint]] = {
    "latents in float8": lambda: made.to_block_fp8(made.deepseek(), 16),
    "experts": made.glm4_moe,
    "gated experts": lambda: made.qwen("qwen3_5_moe"),
    "gated": lambda: made.qwen("qwen3_5"),
    "two modules": lambda: made.rtp_qwen2(
        num_modules=2, hidden_size=made.HIDDEN_SIZE, draft_ids=list(range(0, 90, 2))
    ),
}


@pytest.fixture(params=CASES)
def folders(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    monkeypatch.setattr(made, "HIDDEN_SIZE", 256)  # that four heads of 64 fill
    monkeypatch.setattr(made, "_HEAD_DIM", 64)  # that every kernel has
    monkeypatch.setattr(made, "_COMMON", made._COMMON | {"hidden_size": 256, "head_dim": 64})
    return CASES[request.param]().write(tmp_path)


def _logits(folders: tuple[Path, Path], dtype: torch.dtype, device: torch.device) -> Tensor:
    """After true rows of a prompt, of a tree on it, and of one more row from its own output."""
    head = load_mtp(*folders, dtype, device)
    pools = KVPools(8, PAGE_SIZE, dtype, device)
    backend = choose_backend(None, head.attention_traits(), device)
    head.bind(pools)
    states = torch.randn(32, head.state_size, generator=torch.Generator().manual_seed(0))
    states = head.begin(states.bfloat16())

    def feed(rows: Tensor, start: int, step: int, parents: tuple[int, ...] = ()) -> Tensor:
        tokens = [(7 * (start + i)) % made.VOCAB_SIZE for i in range(len(rows))]
        num_logits = min(len(tokens), 4)
        batch = pack([RowSlice(tokens, start, [5, 1, 3], num_logits, parents)], PAGE_SIZE, device)
        return head.forward(batch.input_ids, rows, backend(batch), step)

    prompt = feed(states[:20], 0, 0)
    tree = feed(states[20:24], 20, 1, (-1, -1, 0, 1))
    last = feed(head.feed_back(prompt[-1:]), 20, 1)
    return head.logits(torch.cat((prompt, tree, last))).float().cpu()


def test_mtp_logits_on_gpu_equal_those_of_cpu(folders: tuple[Path, Path]) -> None:
    expected = _logits(folders, torch.float32, CPU)
    known = expected.isfinite()
    found = _logits(folders, torch.float32, CUDA)
    assert torch.equal(found.isfinite(), known)
    torch.testing.assert_close(found[known], expected[known], rtol=1e-2, atol=1e-2)
    half = _logits(folders, torch.bfloat16, CUDA)
    alike = torch.cosine_similarity(half.where(known, 0), expected.where(known, 0), dim=-1)
    assert alike.median() > 0.99  # an expert more or less makes a row differ


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("folders", ["gated", "two modules"], indirect=True)
def test_captured_mtp_drafts_equal_eager_drafts(folders: tuple[Path, Path], width: int) -> None:
    """After a prompt, of three rows more; modules with experts or latents are not captured."""
    head = load_mtp(*folders, torch.float32, CUDA)
    assert head.capturable
    backend = choose_backend(None, head.attention_traits(), CUDA)
    capture = LoopCapture(
        recurrent_shapes(max_rows=2, max_draft_tokens=5, width=width),
        CudaGraphs(),
        triton_sampler(),
    )
    limits = ProposerLimits(max_model_len=100, max_draft_tokens=5, tree_width=width)
    pools = KVPools(9, PAGE_SIZE, head.dtype, CUDA)
    loops = RecurrentDrafter(head, pools, backend, limits, capture)
    states = torch.randn(23, head.state_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = [(7 * i) % made.VOCAB_SIZE for i in range(23)]
    table = [5, 1, 3, 2]
    prompt = RowSlice(tokens[:20], 0, table, 1)
    greedy = SamplingParams(temperature=0.0)
    loops.drafts([DraftInput(prompt, 0, greedy, features=states[:20])])
    for params in (greedy, SamplingParams(temperature=1.0, seed=4)):
        row = RowSlice(tokens[20:], 20, table, 1)
        given = [DraftInput(row, 5, params, features=states[20:])]
        if width == 1:
            assert loops.drafts(given)[0].tokens == loops._eager(given)[0].tokens
        else:
            trees, found = loops._eager(given), loops.drafts(given)
            assert found[0].tokens[:2] == trees[0].tokens[:2]  # but for near ties
