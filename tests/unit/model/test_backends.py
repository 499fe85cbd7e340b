"""The choice of attention, as far as it can be seen without a GPU."""

from dataclasses import replace

import pytest
import torch

from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.model.attention_backends import (
    BACKEND_NAMES,
    AttentionTraits,
    attention_traits,
    choose_backend,
    is_capturable,
)
from outrider.engine.model.loader import ModelOptions, build_paged_model
from outrider.errors import ConfigError
from tests.support.models.architectures import ARCHITECTURES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA_8B = AttentionTraits(
    frozenset({128}), 32, 8, torch.bfloat16, softcap=False, sinks=False, latent=False
)


def test_choose_backend_on_cpu_with_supported_layers_takes_numba() -> None:
    backend = choose_backend(None, LLAMA_8B, CPU)
    assert backend is not SdpaAttention
    assert not is_capturable(backend)
    assert choose_backend("sdpa", LLAMA_8B, CPU) is SdpaAttention


@pytest.mark.parametrize(
    "change",
    [
        {"softcap": True},
        {"sinks": True},
        {"latent": True},
        {"head_dims": frozenset({64, 80})},
        {"dtype": torch.float16},
    ],
)
def test_choose_backend_on_cpu_with_other_layers_takes_sdpa(change: dict[str, object]) -> None:
    traits = replace(LLAMA_8B, **change)  # type: ignore[arg-type]
    assert choose_backend(None, traits, CPU) is SdpaAttention
    with pytest.raises(ConfigError, match="'numba' cannot be used"):
        choose_backend("numba", traits, CPU)


@pytest.mark.parametrize("name", [name for name in BACKEND_NAMES if name not in ("numba", "sdpa")])
def test_choose_backend_with_gpu_backend_on_cpu_raises(name: str) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        choose_backend(name, LLAMA_8B, CPU)


def test_choose_backend_with_unknown_name_lists_known_names() -> None:
    with pytest.raises(ConfigError, match=r"'paged'; there are flash, .*sdpa"):
        choose_backend("paged", LLAMA_8B, CPU)


def test_choose_backend_without_package_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.engine.model.attention_backends.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="it comes with torch for CUDA"):
        choose_backend("triton", LLAMA_8B, CUDA)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("flash", {"dtype": torch.float32}, "not float32"),
        ("triton", {"head_dims": frozenset({128, 320})}, "320 dimensions"),
        ("triton", {"dtype": torch.float64}, "float32"),
        ("triton", {"latent": True}, "latents"),
    ],
)
def test_choose_backend_with_unsupported_layer_gives_reason(
    name: str, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_backend(name, replace(LLAMA_8B, **change), CUDA)  # type: ignore[arg-type]


def test_choose_backend_on_gpu_with_latents_takes_sdpa() -> None:
    assert choose_backend(None, replace(LLAMA_8B, latent=True), CUDA) is SdpaAttention


@pytest.mark.parametrize(
    ("architecture", "trait"),
    [("llama", None), ("gemma2", "softcap"), ("gpt_oss", "sinks"), ("deepseek_v3", "latent")],
)
def test_attention_traits_of_model_name_its_extras(architecture: str, trait: str | None) -> None:
    traits = attention_traits(ARCHITECTURES[architecture]())
    assert traits.num_heads == 4
    for name in ("softcap", "sinks", "latent"):
        assert getattr(traits, name) == (name == trait)


def test_build_paged_model_with_unusable_backend_raises() -> None:
    with pytest.raises(ConfigError, match="flash"):
        build_paged_model(
            ARCHITECTURES["llama"](),
            ModelOptions(page_size=4, num_pages=8, attention_backend="flash"),
        )
