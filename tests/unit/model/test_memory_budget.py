"""How a device's memory is shared out, as far as numbers go."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from outrider.engine.batch import PackedBatch
from outrider.engine.model.memory_budget import (
    MemoryBudget,
    claim_activations,
    estimate_graphs,
    largest_steps,
)
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.errors import ConfigError
from scorer_service.__main__ import resolve

GIB = 2**30


def budget(limit: int) -> MemoryBudget:
    return MemoryBudget(
        limit=limit,
        weights=15 * GIB,
        activations=2 * GIB,
        graphs=GIB,
        page_bytes=8 * 2**20,
        page_size=64,
    )


def test_memory_budget_with_room_gives_cache_the_rest() -> None:
    roomy = budget(40 * GIB)
    roomy.check(8192)
    shares = roomy.weights + roomy.activations + roomy.graphs + roomy.kv_cache
    assert shares <= 40 * GIB
    assert roomy.limit - shares == 256 * 2**20  # slack
    assert (roomy.num_pages + 1) * roomy.page_bytes <= roomy.kv_cache  # and the scratch page
    assert roomy.kv_cache - (roomy.num_pages + 1) * roomy.page_bytes < roomy.page_bytes


@pytest.mark.parametrize("limit", [17 * GIB, 19 * GIB])
def test_memory_budget_without_room_says_what_to_change(limit: int) -> None:
    with pytest.raises(ConfigError) as caught:
        budget(limit).check(8192)
    for part in ("8192", "--gpu-memory-utilization", "--max-model-len", "weights", "15.00 GiB"):
        assert part in str(caught.value)


def test_estimate_graphs_from_two_largest_covers_all() -> None:
    assert estimate_graphs([GIB, 3 * GIB, 3 * GIB + 10 * 2**20], 5) == 2 * GIB + 40 * 2**20
    assert estimate_graphs([GIB, 3 * GIB, 3 * GIB], 3) >= 2 * GIB
    assert estimate_graphs([GIB, 3 * GIB], 1) == 2 * GIB


@pytest.mark.parametrize(
    ("rows", "tokens", "length"), [(128, 2048, 4096), (3, 16, 8), (64, 8, 512)]
)
def test_largest_steps_for_limits_reach_them(rows: int, tokens: int, length: int) -> None:
    prompts, verification = largest_steps(rows, tokens, length, page_size=16)
    for step in (prompts, verification):
        assert 1 <= len(step) <= rows
        assert sum(len(row.token_ids) for row in step) == min(tokens, rows * length)
        for row in step:
            assert row.start + len(row.token_ids) == length
            assert len(row.block_table) * 16 >= length
    assert sum(row.num_logits for row in verification) == tokens
    assert max(len(row.token_ids) for row in prompts) == min(tokens, length)
    assert not any(row.parents for row in prompts)
    assert all(row.parents for row in verification)


class Counted:
    """Notes the tokens and logits of its forwards, and has memory for so many logits."""

    max_model_len, page_size, device = 64, 16, torch.device("cpu")
    dtype = torch.bfloat16

    def __init__(self, most_logits: int) -> None:
        self.most_logits = most_logits
        self.forwards: list[tuple[int, int]] = []

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        num_logits = len(batch.logits_index)
        if num_logits > self.most_logits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.forwards.append((len(batch.input_ids), num_logits))
        return torch.zeros(num_logits, 8)


def test_claim_activations_with_room_runs_largest_steps() -> None:
    model = Counted(most_logits=48)
    drawn_from: list[torch.dtype] = []

    def draw(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        drawn_from.append(logits.dtype)
        return sample(logits, batch)

    claim_activations(cast(PagedModel, model), draw, max_num_seqs=4, max_num_batched_tokens=48)
    assert model.forwards == [(48, 1), (48, 48)]
    assert drawn_from == [torch.float32, torch.bfloat16] * 2  # its kernels are compiled now


def test_claim_activations_without_room_says_what_to_lower() -> None:
    model = Counted(most_logits=47)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        claim_activations(
            cast(PagedModel, model), sample, max_num_seqs=4, max_num_batched_tokens=48
        )


def test_resolve_with_fewer_tokens_than_rows_raises() -> None:
    with pytest.raises(ConfigError, match="to 600 at least, or lower --max-num-seqs"):
        resolve(["--max-num-seqs", "600", "--max-num-batched-tokens", "512"])


def test_resolve_with_many_rows_raises_the_default_of_tokens() -> None:
    assert resolve(["--max-num-seqs", "600", "--device", "cuda"])["max_num_batched_tokens"] == 2048
    assert resolve(["--max-num-seqs", "600"])["max_num_batched_tokens"] == 600


def test_resolve_on_each_device_has_its_defaults() -> None:
    assert resolve([])["page_size"] == 16
    assert resolve([])["kv_cache_memory"] == 512
    cuda = resolve(["--device", "cuda:1"])
    assert (cuda["page_size"], cuda["kv_cache_memory"]) == (64, None)
    assert resolve(["--device", "cuda", "--page-size", "16"])["page_size"] == 16
