"""What methods with weights are told of their device."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafting.building.config import DraftModelConfig, HeadConfig, ModelConfig
from outrider.drafting.building.methods import build_proposer
from outrider.drafting.building.weights import choose_dtype
from outrider.drafting.cpu.biased_chains import BiasedChains
from outrider.engine.cpu import int8, ops
from outrider.engine.kv_cache.memory import fitting
from outrider.engine.layers.linear import PackedLinear
from outrider.engine.model.loader import count_pages
from outrider.errors import ConfigError
from proposer_service.__main__ import parse


def test_choose_dtype_unless_set_is_the_fastest() -> None:
    on_cpu = DraftModelConfig()
    assert choose_dtype(on_cpu, on_cpu=torch.float32) is torch.float32
    on_cuda = replace(on_cpu, device="cuda")
    assert choose_dtype(on_cuda, on_cpu=torch.float32) is torch.bfloat16
    in_float32 = replace(on_cuda, dtype="float32")
    assert choose_dtype(in_float32, on_cpu=torch.bfloat16) is torch.float32


def test_model_config_with_int8_kernels_quantizes() -> None:
    on_cpu = DraftModelConfig()
    on_cuda = replace(on_cpu, device="cuda")
    assert on_cuda.int8_weights
    assert not on_cpu.int8_weights
    assert not replace(on_cuda, dtype="float32").int8_weights
    assert not replace(on_cuda, quantization="none").int8_weights
    argv = ["--scorer", "127.0.0.1:1", "--quantization", "int8"]
    float32 = ["--dtype", "float32"]
    for flags in ([], ["--device", "cuda", *float32], ["--method", "eagle3", *float32]):
        with pytest.raises(ConfigError, match="--quantization int8 is for --dtype bfloat16"):
            parse([*argv, *flags])
    for device in ("cpu", "cuda"):
        config, _ = parse([*argv, "--device", device, "--method", "eagle3"])
        (method,) = config.methods
        assert isinstance(method, HeadConfig)
        assert method.int8_weights


def test_fp8_is_refused_but_for_a_draft_model_on_cuda() -> None:
    argv = ["--scorer", "127.0.0.1:1", "--quantization", "fp8"]
    config, _ = parse([*argv, "--device", "cuda"])
    (method,) = config.methods
    assert isinstance(method, DraftModelConfig)
    assert (method.quantization, method.int8_weights) == ("fp8", True)
    for flags in ("--device cpu", "--device cuda --dtype float32", "--device cuda --method eagle3"):
        with pytest.raises(ConfigError, match="--quantization fp8 is for --method draft_model on"):
            parse([*argv, *flags.split()])


def test_build_proposer_with_int8_on_a_cpu_without_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8, "available", lambda: False)
    monkeypatch.setattr(ops, "available", lambda: False)
    with pytest.raises(ConfigError, match="--quantization int8: this CPU has no AVX-512 VNNI"):
        build_proposer((HeadConfig(name="medusa", quantization="int8"),), 256, print)
    build_proposer((HeadConfig(name="medusa"),), 256, print)


def test_heads_are_imported_without_numba() -> None:
    """On a GPU nothing needs it."""
    code = "import sys, outrider.drafting.building.heads; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_build_proposer_of_dspark_compiles_the_kernel_of_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling takes ten seconds, and a round of one token is drafted as a chain."""
    drawn: list[int] = []
    draw = BiasedChains.draw

    def drawing(self: BiasedChains, *args: Any) -> Tensor:
        drawn.append(len(args[0]))
        return draw(self, *args)

    monkeypatch.setattr(BiasedChains, "draw", drawing)
    build_proposer((HeadConfig(name="dspark"),), 256, lambda _: None)
    assert drawn


@pytest.mark.skipif(not int8.available(), reason="this CPU has no AVX-512 VNNI")
def test_chains_drawn_before_and_after_their_weight_is_rounded_follow_the_weight() -> None:
    torch.manual_seed(0)
    vocab_size, rank, depth = 512, 64, 4
    embedding, bias = torch.randn(2, vocab_size, rank).bfloat16()
    linear = PackedLinear(bias, None)
    slots = (
        torch.randn(1, depth, rank).bfloat16(),
        torch.randn(1, depth, vocab_size).bfloat16(),
        torch.tensor([3]),
        None,
        (torch.randn(1, rank), torch.zeros(1)),
    )
    chains = BiasedChains(embedding, bias, None, None, linear=linear)
    chains.draw(*slots)
    linear.round_to_int8(int8.Int8Weight)
    fresh = BiasedChains(embedding, bias, None, None, linear=linear)
    assert torch.equal(chains.draw(*slots), fresh.draw(*slots))


def test_take_methods_with_an_unread_model_is_refused() -> None:
    argv = ["--scorer", "127.0.0.1:1", "--model", "embedded", "--method"]
    for methods in ("ngram", "suffix,deterministic"):
        with pytest.raises(ConfigError, match=f"no use with --method {methods}: leave it out, or"):
            parse([*argv, methods])
    for methods in ("draft_model", "ngram,draft_model", "eagle3"):
        config, _ = parse([*argv, methods])
        assert isinstance(config.methods[-1], ModelConfig)
        assert config.methods[-1].model == "embedded"


def test_head_config_on_cuda_projects_features() -> None:
    on_cpu = HeadConfig(name="eagle3")
    on_cuda = replace(on_cpu, device="cuda")
    assert on_cuda.projects_features
    assert not on_cpu.projects_features
    assert not replace(on_cuda, project_features=False).projects_features
    assert replace(on_cpu, project_features=True).projects_features
    assert not HeadConfig(name="mtp", device="cuda").projects_features


def test_build_proposer_with_too_little_memory_is_refused() -> None:
    method = DraftModelConfig(kv_cache_memory=1)
    assert count_pages(method.kv_cache_memory, 2**18) == 4
    with pytest.raises(ConfigError, match="--kv-cache-memory 1 holds not one page"):
        count_pages(method.kv_cache_memory, 2**20 + 1)
    with (
        pytest.raises(ConfigError, match="The module and --kv-cache-memory 1 do not fit"),
        fitting("The module", method.kv_cache_memory),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ConfigError, match="The model does not fit"), fitting("The model", None):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("method", [DraftModelConfig(), HeadConfig(name="eagle3")])
def test_build_proposer_with_too_large_a_cache_is_refused(method: ModelConfig) -> None:
    method = replace(method, kv_cache_memory=10**8)
    with pytest.raises(ConfigError, match="--kv-cache-memory 100000000 do not fit"):
        build_proposer((method,), 256, print)
