"""Drafts behind a step on CUDA graphs: the device goes on from a verdict that the host awaits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.config import EngineConfig
from outrider.drafting.draft_model.loops import DraftModelLoops
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.graphs.loop_inputs import make_shapes
from outrider.drafting.graphs.loops import LoopCapture, triton_sampler
from outrider.drafting.proposer import ProposerLimits
from outrider.engine.cuda.sampling import choose_and_verify
from outrider.engine.engine import Engine
from outrider.engine.graphs.capture import CudaGraphs
from outrider.engine.graphs.decode_buckets import Bucket, make_buckets
from outrider.engine.graphs.decode_graphs import DecodeGraphs
from outrider.engine.graphs.decode_inputs import DecodeInputs
from outrider.policy.base import FixedPolicy
from outrider.types import Request
from tests.support.models.clear_llama import PAGE_SIZE, VOCAB_SIZE, clear_llama
from tests.support.services.drafting_scorer import DraftingScorer, K, draw_requests

pytestmark = pytest.mark.gpu
CUDA, PAGES = torch.device("cuda"), 60


def run(requests: list[Request], *, drafts: bool) -> tuple[int, dict[int, list[int]]]:
    model, method = clear_llama(CUDA, PAGES), None
    runner = DecodeGraphs(
        model,
        [*make_buckets(4, (1, K + 1)), *(Bucket(K + 1, 4, False, n) for n in (7, 10))],
        capture=CudaGraphs(),
        choose_and_verify=choose_and_verify,
    )
    config = EngineConfig(page_size=PAGE_SIZE, num_pages=PAGES, max_num_seqs=4, max_model_len=200)
    engine = Engine(
        model, config, policy=FixedPolicy(K if drafts else 0, max_wait_s=0.0), runner=runner
    )
    if drafts:
        draft = clear_llama(CUDA, PAGES, noise=0.03)
        shapes = make_shapes(rows=(1, 2, 4), query_lens=(1, 2, 16), num_tokens=(1, 2, K))
        loops = DraftModelLoops(draft, LoopCapture(shapes, CudaGraphs(), triton_sampler()))
        method = DraftModelProposer(
            draft, name="llama", limits=ProposerLimits(max_branches=0), chain_drafter=loops
        )
    return DraftingScorer(engine, method).run(requests)


@pytest.mark.parametrize("seed", range(3))
def test_device_drafts_equal_drafts_after_the_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    take_device_drafts = DecodeInputs.take_device_drafts

    def noted(*args: Any) -> None:
        counts["late"] += 1
        take_device_drafts(*args)

    monkeypatch.setattr(DecodeInputs, "take_device_drafts", noted)
    requests = draw_requests(VOCAB_SIZE, seed)
    num_plain, plain = run(requests, drafts=False)
    num_late, late = run(requests, drafts=True)
    assert late == plain
    assert counts["late"] > num_late / 2
    assert num_late < 0.8 * num_plain
    monkeypatch.setattr(Engine, "verify_output", None)
    num_after, after = run(requests, drafts=True)
    assert after == plain
    assert abs(num_late - num_after) <= 2, "as many are accepted; near ties of the draft apart"
