"""The choice of attention, as far as it can be seen without a GPU."""

from dataclasses import replace

import pytest
import torch

from outrider.engine.attention.backends import (
    BACKEND_NAMES,
    AttentionTraits,
    attention_traits,
    choose_backend,
    is_capturable,
)
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.model.loader import build_paged_model
from outrider.errors import ConfigError
from tests.support.architectures import ARCHITECTURES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA_8B = AttentionTraits(
    frozenset({128}), 32, 8, 16, torch.bfloat16, softcap=False, sinks=False, latent=False
)


def test_a_cpu_gets_compiled_attention_where_that_knows_the_layer() -> None:
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
def test_a_cpu_gets_plain_torch_for_anything_else(change: dict[str, object]) -> None:
    traits = replace(LLAMA_8B, **change)  # type: ignore[arg-type]
    assert choose_backend(None, traits, CPU) is SdpaAttention
    with pytest.raises(ConfigError, match="'numba' cannot be used"):
        choose_backend("numba", traits, CPU)


@pytest.mark.parametrize("name", [name for name in BACKEND_NAMES if name not in ("numba", "sdpa")])
def test_a_gpu_backend_on_a_cpu_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        choose_backend(name, LLAMA_8B, CPU)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'paged'; there are flash, .*sdpa"):
        choose_backend("paged", LLAMA_8B, CPU)


def test_what_is_missing_comes_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.attention.backends.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[flashinfer\]'"):
        choose_backend("flashinfer", LLAMA_8B, CUDA)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("flash", {"dtype": torch.float32}, "not float32"),
        ("flash_attn", {"page_size": 16}, "--page-size"),
        ("flash_attn", {"sinks": True}, "sinks"),
        ("flashinfer", {"sinks": True}, "sinks"),
        ("flashinfer", {"head_dims": frozenset({128, 80})}, "80 dimensions"),
        ("triton", {"dtype": torch.float64}, "float32"),
        ("triton", {"latent": True}, "latents"),
    ],
)
def test_a_backend_that_cannot_do_a_layer_says_so(
    name: str, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_backend(name, replace(LLAMA_8B, **change), CUDA)  # type: ignore[arg-type]


def test_latents_are_attended_by_plain_torch_even_on_a_gpu() -> None:
    assert choose_backend(None, replace(LLAMA_8B, latent=True), CUDA) is SdpaAttention


@pytest.mark.parametrize(
    ("architecture", "trait"),
    [("llama", None), ("gemma2", "softcap"), ("gpt_oss", "sinks"), ("deepseek_v3", "latent")],
)
def test_traits_are_read_from_the_model(architecture: str, trait: str | None) -> None:
    traits = attention_traits(ARCHITECTURES[architecture](), 16)
    assert (traits.num_heads, traits.page_size) == (4, 16)
    for name in ("softcap", "sinks", "latent"):
        assert getattr(traits, name) == (name == trait)


def test_a_model_is_not_loaded_with_a_backend_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="flash"):
        build_paged_model(
            ARCHITECTURES["llama"](), page_size=4, num_pages=8, attention_backend="flash"
        )
