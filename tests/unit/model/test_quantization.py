"""Targets whose weights are rounded to 8 bits, against references of their own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outrider.engine.batch import RowSlice, pack
from outrider.engine.layers.quantized import QuantizedWeight
from outrider.engine.model import quantization
from outrider.engine.model.device_reader import DeviceReader
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.errors import ConfigError, UnsupportedModelError
from scorer_service.__main__ import resolve
from tests.support.models.architectures import ARCHITECTURES, build_model, random_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PAGE_SIZE = 8
TOKENS = [i * 7 % 97 for i in range(30)]


def folder_of(build: Callable[[], nn.Module], path: Path) -> Path:
    model: Any = random_model(build, torch.bfloat16)
    model.save_pretrained(path)
    return path


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return load_model(
        folder, ModelOptions(page_size=PAGE_SIZE, num_pages=16, **changes), dtype=dtype
    )


def logits(model: Any, tokens: list[int]) -> Tensor:
    pages = -(-len(tokens) // PAGE_SIZE)
    row = RowSlice(tokens, 0, list(range(pages)), len(tokens))
    return model.forward(pack([row], PAGE_SIZE, model.device)).clone()  # type: ignore[no-any-return]


def rounded(weight: Tensor, name: str) -> Tensor:
    """Round row by row, as the format's definition says; quotients are float32."""
    largest = weight.abs().amax(1, keepdim=True)
    if name == "int8":
        scale = largest / 127
        return torch.round((weight / scale).double()) * scale
    scale = largest / 448
    exact = (weight / scale).double()
    step = torch.exp2(exact.abs().clamp_min(2**-6).log2().floor() - 3)
    return torch.round(exact / step) * step * scale


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize(
    "build",
    [
        *(ARCHITECTURES[family] for family in FAMILIES),
        build_model("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=True),
    ],
    ids=[*FAMILIES, "tied"],
)
def test_rounded_model_equals_reference_of_rounded_weights(
    build: Callable[[], nn.Module], name: str, tmp_path: Path
) -> None:
    folder = folder_of(build, tmp_path)
    found = logits(load(folder, quantization=name), TOKENS)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for path, module in reference.named_modules():
            if path.rpartition(".")[2] in PROJECTIONS:
                module.weight.copy_(rounded(module.weight, name))
        if not reference.config.tie_word_embeddings:
            reference.lm_head.weight.copy_(rounded(reference.lm_head.weight, "int8"))
        reference.set_attn_implementation("eager")
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    plain = logits(load(folder), TOKENS)
    assert (found - plain).norm() > 1e-3 * plain.norm()


def test_weights_are_rounded_in_parts_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(ARCHITECTURES["llama"], tmp_path)
    expected = logits(load(folder, quantization="int8"), TOKENS)
    limit = 20_000  # bytes: of two or three matrices
    monkeypatch.setattr(quantization, "_AT_ONCE", limit)
    sizes: list[int] = []

    class Counting(DeviceReader):
        def tensors(self) -> dict[str, Tensor]:
            found = super().tensors()
            sizes.append(sum(each.nbytes for each in found.values()))
            return found

    monkeypatch.setattr(quantization, "DeviceReader", Counting)
    assert torch.equal(logits(load(folder, quantization="int8"), TOKENS), expected)
    assert len(sizes) > 2
    assert max(sizes) <= limit
    with_all = sum(each.nbytes for each in load_file(folder / "model.safetensors").values())
    assert sum(sizes) == with_all


@pytest.mark.parametrize(("name", "kind"), [("int8", "int8"), ("fp8", "float8 (e4m3) and int8")])
def test_loading_says_what_was_rounded(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(ARCHITECTURES["llama"], tmp_path)
    with caplog.at_level(logging.INFO):
        load(folder, quantization=name)
    assert "22 linear layers hold" in caplog.text
    assert f"GiB of {kind} with a scale per row" in caplog.text


def test_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(ARCHITECTURES["llama"], tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"not finite numbers: {name}"):
        load(folder, quantization="int8")


def test_weight_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(ARCHITECTURES["llama"], tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": 64}))
    with pytest.raises(ConfigError, match=r"gate_proj\.weight is \[48, 32\], not \[64, 32\]"):
        load(folder, quantization="int8")


@pytest.mark.parametrize(
    ("build", "dtype", "told"),
    [
        (ARCHITECTURES["gemma2"], torch.float32, "gemma2 models have no 8-bit weights"),
        (
            ARCHITECTURES["llama"],
            torch.bfloat16,
            "on cpu computes in float32: give --dtype float32",
        ),
        (
            build_model("LlamaConfig", "LlamaForCausalLM", mlp_bias=True),
            torch.float32,
            r"no bias to 8-bit gates \(mlp_bias\)",
        ),
    ],
    ids=["family", "dtype", "bias"],
)
def test_what_has_no_8_bit_weights_is_refused(
    build: Callable[[], nn.Module], dtype: torch.dtype, told: str, tmp_path: Path
) -> None:
    folder = folder_of(build, tmp_path)
    with pytest.raises((ConfigError, UnsupportedModelError), match=told):
        load(folder, dtype, quantization="int8")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_concatenated_weights_equal_concatenated_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = [QuantizedWeight.of(torch.randn(n, 300), dtype, rounds_inputs=False) for n in (5, 7)]
    numbers = [(torch.randn(n, 300) * 30).to(dtype) for n in (256, 100)]
    scales = [torch.rand(-(-len(each) // 128), 3) for each in numbers]
    blocks = [
        QuantizedWeight(number, scale, (128, 128))
        for number, scale in zip(numbers, scales, strict=True)
    ]
    for parts in (rows, blocks, blocks[::-1], blocks[:1] * 2):
        joined = QuantizedWeight.concatenated(parts)
        assert torch.equal(joined.dequantise(), torch.cat([each.dequantise() for each in parts]))
    assert QuantizedWeight.concatenated(blocks).block == (128, 128)
    assert QuantizedWeight.concatenated(blocks[::-1]).block == (1, 128)
    at = numbers[0].float()[200, 260] * scales[0][1, 2]
    assert blocks[0].dequantise()[200, 260] == at


def test_scorer_flag_names_its_values_and_its_engine() -> None:
    assert resolve(["--quantization", "fp8"])["quantization"] == "fp8"
    assert resolve(["--quantization", "none"])["quantization"] is None
    with pytest.raises(ConfigError, match="'int4' is not int8, fp8 or none"):
        resolve(["--quantization", "int4"])


def test_scorer_flag_beside_vllm_names_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engines.has_vllm", lambda: True)
    with pytest.raises(ConfigError, match=r"--quantization fp8 is for --engine native: .*after --"):
        resolve(["--engine", "vllm", "--quantization", "fp8"])
