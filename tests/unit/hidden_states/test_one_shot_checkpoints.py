"""Medusa and MLP-speculator files under all their public names, against float64 references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafting.hidden_states.heads.medusa import MedusaHead
from outrider.drafting.hidden_states.heads.mlp_speculator import MlpSpeculatorHead
from outrider.errors import ConfigError
from tests.support.checkpoints.loading import load_medusa, load_mlp_speculator
from tests.support.checkpoints.one_shot_checkpoints import (
    HIDDEN,
    VOCAB,
    Tensors,
    medusa,
    medusa_reference,
    medusa_vllm,
    mlp_config,
    mlp_reference,
    mlp_speculator,
    random,
    save,
)

STATES = random(5, HIDDEN, seed=77, std=1.0)
LM_HEAD = random(VOCAB, HIDDEN, seed=78)
MEDUSA_CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # wrong, as it is published


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 1}
    tensors = {"lm_head.weight": LM_HEAD, "model.embed_tokens.weight": -LM_HEAD}
    return save(folder, config, tensors, "model.safetensors")


def load(folder: Path, target: Path) -> MedusaHead:
    return load_medusa(folder, target, dtype=torch.float32, device=torch.device("cpu"))


def load_mlp(folder: Path, target: Path) -> MlpSpeculatorHead:
    return load_mlp_speculator(folder, target, dtype=torch.float32, device=torch.device("cpu"))


def check(head: MedusaHead, tensors: Tensors, *, heads: int, lm_head: Tensor | None = None) -> None:
    assert head.max_depth == heads
    assert head.vocab_size == VOCAB
    assert (head.features.layers, head.features.final_norm) == ((), True)
    for i in range(heads):
        found = head.logits(STATES, i).double()
        for row, state in enumerate(STATES):
            expected = medusa_reference(tensors, i, state, lm_head)
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa_1_without_base_model_equals_the_formula(
    tmp_path: Path, target: Path, file: str, layers: int
) -> None:
    tensors = medusa(heads=5, layers=layers)
    check(load(save(tmp_path / "m", MEDUSA_CONFIG, tensors, file), target), tensors, heads=5)


def test_medusa_2_inside_the_model_equals_the_formula(tmp_path: Path, target: Path) -> None:
    tensors = medusa(heads=3)
    inside = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    whole = {**inside, "lm_head.weight": -LM_HEAD, "model.norm.weight": random(HIDDEN, seed=1)}
    folder = save(tmp_path / "m", {"model_type": "llama"}, whole, "model.safetensors")
    check(load(folder, target), tensors, heads=3)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa_1_with_base_model_in_its_folder_equals_the_formula(
    tmp_path: Path, target: Path, file: str
) -> None:
    tensors = medusa(heads=3)
    folder = save(tmp_path / "m", MEDUSA_CONFIG, tensors, file)
    whole = {"lm_head.weight": -LM_HEAD, "model.norm.weight": random(HIDDEN, seed=1)}
    save_file(whole, folder / "model.safetensors")
    check(load(folder, target), tensors, heads=3)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_medusa_with_vllm_names_equals_the_formula(
    tmp_path: Path, target: Path, prefix: str
) -> None:
    tensors = medusa(heads=4)
    named = {prefix + name: tensor for name, tensor in medusa_vllm(tensors).items()}
    config = {"model_type": "medusa", "vocab_size": VOCAB, "truncated_vocab_size": VOCAB}
    check(load(save(tmp_path / "m", config, named, "model.safetensors"), target), tensors, heads=4)


def test_medusa_without_biases_needs_none(tmp_path: Path, target: Path) -> None:
    tensors = medusa(heads=2)
    folder = save(tmp_path / "m", {}, medusa_vllm(tensors, bias=False), "model.safetensors")
    unbiased = {n: t * 0 if n.endswith("bias") else t for n, t in tensors.items()}
    check(load(folder, target), unbiased, heads=2)
    save(folder, {"medusa_fc_bias": True}, medusa_vllm(tensors, bias=False), "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor blocks\.0\.layers\.0\.bias"):
        load(folder, target)


@pytest.mark.parametrize("names", ["original", "vllm"])
@pytest.mark.parametrize("stored", [None, "lm_heads.0.weight", "lm_head.weight"])
def test_medusa_with_one_output_layer_equals_the_formula(
    tmp_path: Path, target: Path, names: str, stored: str | None
) -> None:
    if names == "original" and stored == "lm_heads.0.weight":
        stored = "0.1.weight"
    tensors = medusa(heads=3, lm_heads=False)
    named = tensors if names == "original" else medusa_vllm(tensors)
    lm_head = LM_HEAD if stored is None else LM_HEAD * 2
    if stored is not None:
        named = {**named, stored: lm_head}
    folder = save(tmp_path / "m", {"original_lm_head": True}, named, "model.safetensors")
    check(load(folder, target), tensors, heads=3, lm_head=lm_head)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_medusa_with_a_token_map_equals_the_formula(
    tmp_path: Path, target: Path, shared: bool, cut: bool
) -> None:
    """`token_map` names them; the file may hold the rows of all tokens or only theirs."""
    tensors = medusa(heads=3)
    known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:20]
    named = medusa_vllm(tensors)
    for name in [name for name in named if name.startswith("lm_heads")]:
        if shared:
            del named[name]
        elif cut:
            named[name] = named[name][known]
    named["token_map"] = known
    config = {"truncated_vocab_size": 20, "original_lm_head": shared}
    head = load(save(tmp_path / "m", config, named, "model.safetensors"), target)
    for i in range(3):
        expected = medusa_reference(tensors, i, STATES[0], LM_HEAD if shared else None)
        unknown = torch.ones(VOCAB, dtype=torch.bool)
        unknown[known] = False
        expected[unknown] = -torch.inf
        found = head.logits(STATES[:1], i)[0].double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


BROKEN_MEDUSA: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "no heads": ({}, {f"{i}.0.linear.weight": None for i in range(4)}, "no Medusa heads"),
    "a head is missing": ({}, {"2.0.linear.weight": None}, r"no tensor 2\.0\.linear\.weight"),
    "no bias": ({}, {"1.0.linear.bias": None}, r"no tensor 1\.0\.linear\.bias"),
    "no output layer": ({}, {"3.1.weight": None}, r"no tensor 3\.1\.weight"),
    "another target": ({}, {"0.1.weight": random(VOCAB + 3, HIDDEN, seed=0)}, r"0\.1\.weight in"),
    "another width": (
        {},
        {"0.0.linear.weight": random(8, 8, seed=0)},
        r"0\.0\.linear\.weight in .* \[8, 8\]",
    ),
    "more than heads": ({}, {"fc.weight": random(3, seed=0)}, r"holds fc\.weight"),
    "a scale that is none": ({"logit_scale": "x"}, {}, "logit_scale must be a number"),
    "no map": ({"truncated_vocab_size": 20}, {}, "no tensor token_map"),
    "map of unknown tokens": ({}, {"token_map": torch.tensor([1, VOCAB])}, "token_map in"),
    "map with repeats": ({}, {"token_map": torch.tensor([1, 1])}, "token_map in"),
    "map of another size": (
        {"truncated_vocab_size": 3},
        {"token_map": torch.tensor([1, 2])},
        "token_map in",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_MEDUSA)
def test_medusa_with_unfitting_tensors_is_refused(tmp_path: Path, target: Path, fault: str) -> None:
    config, changes, message = BROKEN_MEDUSA[fault]
    changed = {**medusa(heads=4), **changes}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    folder = save(tmp_path / "m", config, tensors, "medusa_lm_head.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(folder, target)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("n_predict", [2, 3])
def test_mlp_speculator_with_any_settings_equals_the_formula(
    tmp_path: Path, target: Path, tied: bool, scaled: bool, n_predict: int
) -> None:
    config = mlp_config(n_predict=n_predict, tied=tied, scaled=scaled)
    tensors = mlp_speculator(config)
    head = load_mlp(save(tmp_path / "m", config, tensors, "model.safetensors"), target)
    assert head.max_depth == n_predict, "also where fewer tokens are drafted"
    tokens = torch.tensor([[3, 60, 0, 9, 12], [8, 8, 1, 2, 3], [0, 5, 55, 30, 4]])
    states = head.begin(STATES)
    for depth in range(n_predict):
        states, logits = head.step(states, tokens[depth], depth)
        for row, state in enumerate(STATES):
            path = tokens[: depth + 1, row].tolist()
            expected = mlp_reference(tensors, config, state, path)
            torch.testing.assert_close(logits[row].double(), expected, rtol=1e-4, atol=1e-4)


def test_mlp_speculator_with_repeated_tied_weights_is_read(tmp_path: Path, target: Path) -> None:
    config = mlp_config(tied=True, scaled=True)
    tensors = mlp_speculator(config, prefix="")
    twice = {**tensors, "emb.1.weight": tensors["emb.0.weight"]}
    named = {f"speculator.{name}": tensor for name, tensor in twice.items()}
    plain = load_mlp(save(tmp_path / "a", config, tensors, "model.safetensors"), target)
    other = load_mlp(save(tmp_path / "b", config, named, "pytorch_model.bin"), target)
    tokens = torch.arange(5)
    found = [head.step(head.begin(STATES), tokens, 0)[1] for head in (plain, other)]
    assert torch.equal(*found)


BROKEN_MLP: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "another method's": ({"model_type": "eagle"}, {}, "model_type is 'eagle'"),
    "another width": ({"emb_dim": HIDDEN + 1}, {}, "emb_dim 25 .* hidden_size 24"),
    "another vocabulary": ({"vocab_size": 60}, {}, "vocab_size 60 .* vocab_size 61"),
    "more steps than weights": ({"n_predict": 4}, {}, r"no tensor speculator\.emb\.3\.weight"),
    "fewer steps than weights": ({"n_predict": 2}, {}, r"holds speculator\.emb\.2\.weight"),
    "no steps": ({"n_predict": 0}, {}, "n_predict"),
    "not this wide inside": ({"inner_dim": 21}, {}, r"speculator\.emb\.0\.weight in"),
    "a missing bias": ({}, {"speculator.ln.1.bias": None}, r"no tensor speculator\.ln\.1\.bias"),
    "a turned matrix": (
        {},
        {"speculator.proj.0.weight": random(HIDDEN, 20, seed=0)},
        r"speculator\.proj\.0\.weight in .* \[24, 20\]",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_MLP)
def test_mlp_speculator_with_unfitting_tensors_is_refused(
    tmp_path: Path, target: Path, fault: str
) -> None:
    settings, changes, message = BROKEN_MLP[fault]
    config = mlp_config(tied=False, scaled=False)
    changed = {**mlp_speculator(config), **changes}
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    folder = save(tmp_path / "m", {**config, **settings}, tensors, "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_mlp(folder, target)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_one_shot_heads_with_quantised_weights_are_refused(
    tmp_path: Path, target: Path, dtype: torch.dtype
) -> None:
    """Their factors lie beside other tensors that are not read."""
    config = mlp_config(tied=True, scaled=False)
    tensors = mlp_speculator(config)
    tensors["speculator.head.0.weight"] = tensors["speculator.head.0.weight"].to(dtype)
    tensors["speculator.head.0.weight_scale"] = torch.ones(1)
    folder = save(tmp_path / "mlp", config, tensors, "model.safetensors")
    with pytest.raises(ConfigError, match=r"head\.0\.weight in .* is stored as torch"):
        load_mlp(folder, target)
    tensors = {f"medusa_head.{name}": tensor for name, tensor in medusa().items()}
    tensors["medusa_head.1.1.weight"] = tensors["medusa_head.1.1.weight"].to(dtype)
    folder = save(tmp_path / "medusa", {}, tensors, "model.safetensors")
    with pytest.raises(ConfigError, match=r"medusa_head\.1\.1\.weight in .* is stored as torch"):
        load(folder, target)


def test_checkpoint_of_a_pickle_with_code_is_refused(tmp_path: Path, target: Path) -> None:
    folder = save(tmp_path / "m", MEDUSA_CONFIG, {}, "medusa_lm_head.pt")
    torch.save({"0.0.linear.weight": Path}, folder / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(folder, target)


@pytest.mark.parametrize("left", ["training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"])
def test_checkpoint_with_training_state_ignores_it(tmp_path: Path, target: Path, left: str) -> None:
    tensors = medusa(heads=2)
    folder = save(tmp_path / "m", MEDUSA_CONFIG, tensors, "medusa_lm_head.bin")
    torch.save({"arguments": Path()}, folder / left)
    check(load(folder, target), tensors, heads=2)
    (folder / "medusa_lm_head.bin").rename(folder / "pytorch_model.bin")
    check(load(folder, target), tensors, heads=2)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        load(folder, target)


def test_checkpoint_in_both_formats_prefers_safetensors(tmp_path: Path, target: Path) -> None:
    tensors = medusa(heads=2)
    folder = save(tmp_path / "m", MEDUSA_CONFIG, medusa(heads=3), "medusa_lm_head.pt")
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    assert json.loads((folder / "config.json").read_text()) == MEDUSA_CONFIG
    check(load(folder, target), tensors, heads=2)
