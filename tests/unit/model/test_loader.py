"""From a checkpoint folder to a model that runs, or to the reason why not."""

from __future__ import annotations

import json
import shutil
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from outrider.config import KV_CACHE_DTYPES
from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.model import llama
from outrider.engine.model.loader import (
    ModelOptions,
    build_paged_model,
    kv_bytes_per_page,
    load_model,
)
from outrider.engine.model.paged_model import PagedModel
from outrider.engine.model.selftest import check_against, eager_reference
from outrider.errors import ConfigError, UnsupportedModelError
from outrider.models.eos import read_eos_token_ids
from outrider.models.resolve import resolve_model
from tests.support.models.architectures import ARCHITECTURES, build_model, random_model

PAGE_SIZE = 8
NUM_PAGES = 16


def _llama(**changes: Any) -> nn.Module:
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "tie_word_embeddings": True,
        "eos_token_id": [2, 5],
    }
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    model: Any = _llama()
    model.save_pretrained(path)
    return path


def _load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> PagedModel:
    options = ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, **changes)
    return load_model(folder, options, dtype=dtype)


def _logits(model: PagedModel) -> Tensor:
    """A prompt, and the same prompt's end verified again in another batch."""
    prompt = [i * 7 % 64 for i in range(30)]
    rows = [RowSlice(prompt, 0, [3, 9, 1, 4], 30), RowSlice(prompt[:5], 0, [7], 2)]
    first = model.forward(pack(rows, PAGE_SIZE, model.device)).clone()
    rows = [RowSlice(prompt[5:9], 5, [7, 2], 4), RowSlice(prompt[25:], 25, [3, 9, 1, 4], 5)]
    return torch.cat((first, model.forward(pack(rows, PAGE_SIZE, model.device))))


@pytest.mark.parametrize("in_config", [[2, 5], 3, None])
@pytest.mark.parametrize("in_generation", [[2, 7], None, "no file"])
def test_read_eos_token_ids_without_weights_equals_loaded_model(
    folder: Path, tmp_path: Path, in_config: object, in_generation: object
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    files = {"config.json": in_config, "generation_config.json": in_generation}
    for name, eos in files.items():
        settings = json.loads((folder / name).read_text())
        del settings["eos_token_id"]
        settings |= {} if eos is None else {"eos_token_id": eos}
        (tmp_path / name).write_text(json.dumps(settings))
    if in_generation == "no file":
        (tmp_path / "generation_config.json").unlink()
    assert read_eos_token_ids(tmp_path) == _load(tmp_path, self_test=False).eos_token_ids


def test_load_model_with_invalid_setting_names_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "hidden_size": "wide"}))
    with pytest.raises(ConfigError, match=r"config\.json in .* cannot be read: .*'hidden_size'"):
        _load(tmp_path)


def test_load_model_of_folder_runs(folder: Path) -> None:
    model = _load(folder, max_model_len=64)
    assert (model.name, model.vocab_size, model.max_model_len) == ("tiny", 64, 64)
    assert model.eos_token_ids == {2, 5}
    assert (model.page_size, model.num_pages) == (PAGE_SIZE, NUM_PAGES)
    logits = _logits(model)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits[32:36], logits[5:9])
    torch.testing.assert_close(logits[36:], logits[25:30])


def test_load_model_in_bfloat16_stays_close_to_float32(folder: Path) -> None:
    exact, rounded = _logits(_load(folder)), _logits(_load(folder, torch.bfloat16))
    assert rounded.dtype is torch.float32
    assert float((exact - rounded).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_step_of_llama_family_equals_modules(name: str) -> None:
    def logits(fused: bool) -> Tensor:
        model = random_model(ARCHITECTURES[name], torch.float32)
        return _logits(
            build_paged_model(
                model, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, fused=fused)
            )
        )

    torch.testing.assert_close(logits(True), logits(False), atol=2e-3, rtol=1e-4)


def test_load_model_with_longer_max_model_len_bounds_it(folder: Path) -> None:
    assert _load(folder, max_model_len=10_000).max_model_len == 96


def test_max_model_len_of_longrope_is_original_context() -> None:
    config = Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 32,
        },
    )
    model = build_paged_model(
        Phi3ForCausalLM(config), ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    )
    assert model.max_model_len == 32


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("cache", KV_CACHE_DTYPES)
def test_kv_bytes_per_page_from_config_equals_loaded_model(
    name: str, cache: str, tmp_path: Path
) -> None:
    source = random_model(ARCHITECTURES[name], torch.float32)
    source.config.save_pretrained(tmp_path)
    sizes = {"page_size": PAGE_SIZE, "dtype": torch.float32}
    told = kv_bytes_per_page(tmp_path, **sizes, kv_cache_dtype=cache)  # type: ignore[arg-type]
    options = ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, kv_cache_dtype=cache)
    model = build_paged_model(source, options)
    assert told == model.kv_bytes_per_page


def test_load_model_with_missing_or_broken_files_raises_config_error(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        _load(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="no weights"):
        _load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ConfigError, match="no safetensors file"):
        _load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        _load(tmp_path)
    with pytest.raises(ConfigError):
        kv_bytes_per_page(tmp_path, dtype=torch.float32, page_size=PAGE_SIZE)


class _OnePlaceLate:
    """A model that gives every position the logits of the one before it."""

    def __init__(self, model: PagedModel) -> None:
        self._model = model
        self.dtype = model.dtype
        self.device = model.device
        self.page_size = model.page_size
        self.num_pages = model.num_pages
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len

    def windows_at_most(self, length: int) -> AbstractContextManager[None]:
        return self._model.windows_at_most(length)

    def forward(self, batch: PackedBatch) -> Tensor:
        return self._model.forward(batch).roll(1, dims=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2's pools come with its first forward
def test_build_paged_model_with_too_many_pages_on_cpu_raises_out_of_memory(name: str) -> None:
    model = random_model(ARCHITECTURES[name], torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        build_paged_model(model, ModelOptions(page_size=PAGE_SIZE, num_pages=10**10))


def test_fused_step_keeps_no_second_copy_of_weights_that_it_packs() -> None:
    model: Any = random_model(ARCHITECTURES["llama"], torch.float32)
    layer = model.model.layers[0]
    weights = [weakref.ref(each.weight) for each in (layer.self_attn.q_proj, layer.mlp.up_proj)]
    build_paged_model(model, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES))
    assert [weight() for weight in weights] == [None, None]


def test_self_test_with_wrong_logits_refuses_model() -> None:
    sizes = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "max_model_len": 96}
    model = random_model(ARCHITECTURES["llama"], torch.float32)
    reference = eager_reference(model, **sizes)
    paged = build_paged_model(
        model, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES, self_test=False)
    )
    check_against(paged, reference)
    with pytest.raises(UnsupportedModelError, match="self-test failed"):
        check_against(_OnePlaceLate(paged), reference)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sliding_window_in_config_is_used_only_where_the_architecture_uses_it(
    name: str, dtype: torch.dtype
) -> None:
    build = build_model(f"{name}Config", f"{name}ForCausalLM", sliding_window=12)
    model: Any = random_model(build, dtype)
    model.set_attn_implementation("eager")
    tokens = torch.arange(40) * 7 % model.config.vocab_size
    with torch.inference_mode():
        expected = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    paged = build_paged_model(model, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES))
    row = RowSlice(tokens.tolist(), 0, [3, 9, 1, 4, 7], 40)
    got = paged.forward(pack([row], PAGE_SIZE, paged.device))
    bound = 1e-4 if dtype is torch.float32 else 0.05
    assert float((got - expected).norm() / expected.norm()) < bound


def test_self_test_with_a_window_that_the_model_ignores_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window is longer than the rows of the test."""
    model = random_model(
        build_model("LlamaConfig", "LlamaForCausalLM", sliding_window=64), torch.float32
    )
    monkeypatch.setattr(llama, "_sliding_window", lambda attention: attention.config.sliding_window)
    with pytest.raises(UnsupportedModelError, match="self-test failed"):
        build_paged_model(model, ModelOptions(page_size=PAGE_SIZE, num_pages=NUM_PAGES))


def test_resolve_model_with_folder_or_wrong_path_resolves_or_raises(
    folder: Path, tmp_path: Path
) -> None:
    assert resolve_model(str(folder), "target") == folder
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path), "target")
    with pytest.raises(ConfigError, match="no model folder"):
        resolve_model(str(tmp_path / "nothing"), "draft")
    with pytest.raises(ConfigError):
        resolve_model("not a name!", "draft")
