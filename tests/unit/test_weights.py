"""What methods with weights are told of their device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.engine.loader import count_pages
from outrider.errors import ConfigError
from proposer_service.config import DraftModelConfig
from proposer_service.weights import choose_dtype, fitting


def test_a_draft_is_computed_in_what_is_fastest_unless_told_otherwise() -> None:
    on_cpu = DraftModelConfig()
    assert choose_dtype(on_cpu, on_cpu=torch.float32) is torch.float32
    on_cuda = replace(on_cpu, device="cuda")
    assert choose_dtype(on_cuda, on_cpu=torch.float32) is torch.bfloat16
    told = replace(on_cuda, dtype="float32")
    assert choose_dtype(told, on_cpu=torch.bfloat16) is torch.float32


def test_memory_that_holds_nothing_is_told() -> None:
    method = DraftModelConfig(kv_cache_memory=1)
    assert count_pages(method.kv_cache_memory, 2**18) == 4
    with pytest.raises(ConfigError, match="--kv-cache-memory 1 holds not one page"):
        count_pages(method.kv_cache_memory, 2**20 + 1)
    with (
        pytest.raises(ConfigError, match="The module and --kv-cache-memory 1 do not fit"),
        fitting(method, "The module"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
