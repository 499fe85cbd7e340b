"""Checkpoints of 8 bits as they are published, against references that dequantise them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.drafting.cpu.llama_chains import LlamaChains
from outrider.drafting.drafters import DraftInput
from outrider.drafting.graphs.chains import draft_chains
from outrider.drafting.hidden_states.checkpoints import Checkpoint
from outrider.engine.batch import RowSlice, pack
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.engines import AUTO, NATIVE, VLLM, Wanted, choose
from outrider.errors import ConfigError
from outrider.models.local_files import check_target
from outrider.params import SamplingParams
from tests.support.models.architectures import ARCHITECTURES, random_model

PROJECTION = re.compile(r".*\.(q|k|v|o|gate|up|down)_proj\.weight")
TOKENS = [i * 7 % 97 for i in range(30)]
DOWN = "model.layers.1.mlp.down_proj.weight"
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}


class Format(NamedTuple):
    """A published format: its config, and its tensors for a weight."""

    config: dict[str, Any]
    dtype: torch.dtype
    suffix: str
    block: tuple[int, int]  # 0: the whole axis
    flat: bool = False  # one scale for all, of shape [1]


def compressed(strategy: str, number: str = "float", **weights: Any) -> dict[str, Any]:
    kind = {"float": "float-quantized", "int": "int-quantized"}[number]
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    **{"num_bits": 8, "type": number, "strategy": strategy},
                    **{"symmetric": True, "dynamic": False, "group_size": None},
                    **weights,
                },
                "input_activations": {**DYNAMIC, "type": number},
                "output_activations": None,
            }
        },
    }


FP8, INT8 = torch.float8_e4m3fn, torch.int8
BLOCKS = {
    **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
    **{"weight_block_size": [16, 8], "modules_to_not_convert": ["lm_head"]},
}
BY_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMATS = {
    "fp8 per block": Format(BLOCKS, FP8, "_scale_inv", (16, 8)),
    "fp8 per tensor": Format(BY_TENSOR, FP8, "_scale", (0, 0), flat=True),
    "ct fp8 per tensor": Format(compressed("tensor"), FP8, "_scale", (0, 0), flat=True),
    "ct fp8 per channel": Format(compressed("channel"), FP8, "_scale", (1, 0)),
    "ct fp8 per group": Format(compressed("group", group_size=8), FP8, "_scale", (1, 8)),
    "ct fp8 per block": Format(
        compressed("block", block_structure=[16, 8]), FP8, "_scale", (16, 8)
    ),
    "ct int8 per tensor": Format(compressed("tensor", "int"), INT8, "_scale", (0, 0), flat=True),
    "ct int8 per channel": Format(compressed("channel", "int"), INT8, "_scale", (1, 0)),
    "ct int8 per group": Format(compressed("group", "int", group_size=8), INT8, "_scale", (1, 8)),
}


def quantised(weight: Tensor, form: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers, scales, and what they stand for, block by block in a plain loop."""
    rows, columns = (size or whole for size, whole in zip(form.block, weight.shape, strict=True))
    counts = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)]
    scales, exact = torch.empty(counts), torch.empty_like(weight, dtype=torch.float32)
    numbers = torch.empty_like(weight, dtype=form.dtype)
    for i in range(counts[0]):
        for j in range(counts[1]):
            here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            part = weight[here].float()
            scales[i, j] = part.abs().max() / (127 if form.dtype is INT8 else 448)
            number = part / scales[i, j]
            numbers[here] = (number.round() if form.dtype is INT8 else number).to(form.dtype)
            exact[here] = numbers[here].float() * scales[i, j]
    return numbers, scales.flatten() if form.flat else scales, exact


def write(folder: Path, form: Format, family: str = "llama") -> dict[str, Tensor]:
    """Write a small checkpoint in this format, and return the weights that it stands for."""
    model: Any = random_model(ARCHITECTURES[family], torch.bfloat16)
    model.save_pretrained(folder)
    tensors, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not PROJECTION.fullmatch(name):
            tensors[name] = meant[name] = weight
            continue
        tensors[name], tensors[name + form.suffix], meant[name] = quantised(weight, form)
    change(folder, lambda held: (held.clear(), held.update(tensors)), form.config)
    return meant


def change(folder: Path, tensors: Callable[[dict[str, Tensor]], Any], config: Any = None) -> None:
    held = load_file(folder / "model.safetensors")
    tensors(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    if config is not None:
        fields["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(fields))


def load(folder: Path, **options: Any) -> Any:
    return load_model(
        folder, ModelOptions(page_size=8, num_pages=16, **options), dtype=torch.float32
    )


@pytest.mark.parametrize("name", FORMATS)
def test_published_format_equals_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    family = {"fp8 per block": "qwen3", "ct int8 per channel": "qwen2"}.get(name, "llama")
    meant = write(tmp_path / "small", FORMATS[name], family)
    check_target(str(tmp_path / "small"))
    model = load(tmp_path / "small")
    row = RowSlice(TOKENS, 0, list(range(4)), len(TOKENS))
    found = model.forward(pack([row], 8, model.device))
    plain: Any = random_model(ARCHITECTURES[family], torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    reference.load_state_dict({key: each.float() for key, each in meant.items()})
    reference.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    assert torch.equal(Checkpoint(tmp_path / "small").tensor(DOWN), meant[DOWN])  # of a head
    chains = LlamaChains.of(model)
    assert (chains is None) == (family != "llama")  # others have norms of heads, or windows
    if chains is not None:
        drafts = [DraftInput(row._replace(num_logits=1), 1, SamplingParams(temperature=0.0))]
        assert chains.draft(drafts)[0][0] == draft_chains(model, drafts)[0][0]


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors[DOWN].view(torch.uint8)[2, 3] = 0xFF


SCALE = f"{DOWN}_scale_inv"
FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scale": (lambda t: t.pop(SCALE), f"holds no tensor {SCALE}"),
    "scales of another shape": (
        lambda t: t.update({SCALE: torch.ones(2, 5)}),
        rf"{SCALE} in .* is of shape \[2, 5\]; \[2, 6\] follows from {DOWN}",
    ),
    "scales of another type": (
        lambda t: t.update({SCALE: torch.ones(2, 6, dtype=torch.int32)}),
        f"type I32, .*: {SCALE}",
    ),
    "scales without numbers": (
        lambda t: t.update({DOWN: t[DOWN].to(torch.bfloat16)}),
        rf"does not use: {SCALE}",
    ),
    "infinite scales": (lambda t: t[SCALE].fill_(float("inf")), f"not finite numbers: {DOWN}"),
    "NaN": (_nan, f"not finite numbers: {DOWN}"),
    "numbers of another type": (
        lambda t: t.update({DOWN: t[DOWN].float().to(torch.int8)}),
        rf"type I8, but its config.json names weights of type F8_E4M3: {DOWN}",
    ),
    "an 8-bit embedding": (
        lambda t: t.update(
            {
                "model.embed_tokens.weight": t["model.embed_tokens.weight"].to(FP8),
                "model.embed_tokens.weight_scale_inv": torch.ones(7, 4),
            }
        ),
        r"no linear layer of its model has the weight model\.embed_tokens\.weight",
    ),
    "a weight that is missing": (
        lambda t: (t.pop(DOWN), t.pop(SCALE)),
        rf"missing: {DOWN}",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    write(tmp_path, FORMATS["fp8 per block"])
    broken, told = FAULTS[fault]
    change(tmp_path, broken)
    with pytest.raises(ConfigError, match=told):
        load(tmp_path)


def with_group(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, **changes}}}


CHANNEL = compressed("channel")
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "static inputs": ({**BLOCKS, "activation_scheme": "static"}, "fp8, activation_scheme static"),
    "e5m2": ({**BLOCKS, "fmt": "e5m2"}, "fp8, fmt e5m2"),
    "empty blocks": ({**BLOCKS, "weight_block_size": [16, 0]}, r"weight_block_size \[16, 0\]"),
    "packed": ({**CHANNEL, "format": "pack-quantized"}, "format pack-quantized"),
    "4 bits": (compressed("channel", "int", num_bits=4), "weights of 4 bits"),
    "asymmetric": (compressed("channel", "int", symmetric=False), "not symmetric"),
    "reordered": (compressed("group", group_size=8, actorder="group"), "actorder group"),
    "static inputs of ct": (
        with_group(CHANNEL, input_activations={**DYNAMIC, "dynamic": False}),
        "input_activations that are not dynamic",
    ),
    "other targets": (with_group(CHANNEL, targets=["re:.*q_proj"]), "other config_groups"),
    "8-bit keys": ({**CHANNEL, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    "no groups": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "lacks"),
    "another method": ({"quant_method": "awq", "bits": 4}, "awq"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused_by_name_with_vllm_named(name: str, tmp_path: Path) -> None:
    write(tmp_path, FORMATS["ct fp8 per channel"])
    config, told = OTHERS[name]
    change(tmp_path, lambda _: None, config)
    with pytest.raises(ConfigError, match=rf"is quantised \(.*{told}.*\)\. .*--engine vllm"):
        load(tmp_path)
    assert choose(AUTO, Wanted.of(tmp_path, on_gpu=True), installed=True) == VLLM


@pytest.mark.parametrize(
    ("name", "on_gpu", "engine"),
    [
        ("fp8 per block", False, NATIVE),
        ("fp8 per block", True, VLLM),
        ("ct fp8 per channel", True, VLLM),
        ("ct int8 per channel", True, NATIVE),
    ],
)
def test_engine_of_a_format_is_the_faster_one(
    name: str, on_gpu: bool, engine: str, tmp_path: Path
) -> None:
    write(tmp_path, FORMATS[name])
    wanted = Wanted.of(tmp_path, on_gpu=on_gpu)
    assert choose(AUTO, wanted, installed=True) == engine
    assert choose(NATIVE, wanted, installed=True) == NATIVE
    if engine == VLLM:
        with pytest.raises(ConfigError, match="--engine native, which serves it slower"):
            choose(AUTO, wanted, installed=False)


def test_quantised_checkpoint_is_not_rounded_again_or_read_for_other_families(
    tmp_path: Path,
) -> None:
    write(tmp_path, FORMATS["fp8 per block"])
    with pytest.raises(ConfigError, match="quantised already"):
        load(tmp_path, quantization="int8")
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": "deepseek_v3"}))
    assert choose(AUTO, Wanted.of(tmp_path, on_gpu=True), installed=True) == VLLM
    with pytest.raises(ConfigError, match=r"not for deepseek_v3\. .*--engine vllm"):
        check_target(str(tmp_path))


def test_config_that_announces_8_bits_of_none_is_refused(tmp_path: Path) -> None:
    random_model(ARCHITECTURES["llama"], torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[operator]
    change(tmp_path, lambda _: None, BLOCKS)
    with pytest.raises(ConfigError, match=r"quantised \(fp8\) .* no tensor .* F8_E4M3"):
        load(tmp_path)
