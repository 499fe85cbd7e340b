"""Small random Medusa and MLP-speculator checkpoints with the public names, and what they say.

The references are straight-line float64, written from the formats, one row and one head at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB, INNER = 24, 61, 20
Tensors = dict[str, Tensor]


def random(*shape: int, seed: int, std: float = 0.5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def medusa(*, heads: int = 4, layers: int = 1, lm_heads: bool = True) -> Tensors:
    """Names of FasterDecoding's files, which text-generation-inference shares."""
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = random(HIDDEN, HIDDEN, seed=100 * i + j, std=0.2)
            tensors[f"{i}.{j}.linear.bias"] = random(HIDDEN, seed=100 * i + j + 50)
        if lm_heads:
            tensors[f"{i}.{layers}.weight"] = random(VOCAB, HIDDEN, seed=1000 + i)
    return tensors


def medusa_vllm(tensors: Tensors, *, bias: bool = True) -> Tensors:
    """The same under vLLM's names."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        i, j, *rest = name.split(".")
        if rest == ["weight"]:
            renamed[f"lm_heads.{i}.weight"] = tensor
        elif bias or rest[-1] == "weight":
            renamed[f"blocks.{i}.layers.{j}.{rest[-1]}"] = tensor
    return renamed


def medusa_reference(
    tensors: Mapping[str, Tensor], head: int, state: Tensor, lm_head: Tensor | None = None
) -> Tensor:
    """Logits of one head for one state [hidden], float64; tensors under the original names."""
    x = state.double()
    j = 0
    while f"{head}.{j}.linear.weight" in tensors:
        a, b = tensors[f"{head}.{j}.linear.weight"], tensors[f"{head}.{j}.linear.bias"]
        y = a.double() @ x + b.double()
        x = x + y / (1 + torch.exp(-y))
        j += 1
    weight = tensors[f"{head}.{j}.weight"] if lm_head is None else lm_head
    return weight.double() @ x


def mlp_config(*, n_predict: int = 3, tied: bool, scaled: bool) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": HIDDEN,
        "inner_dim": INNER,
        "n_predict": n_predict,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3, 2][:n_predict],
        "tie_weights": tied,
        "scale_input": scaled,
        "vocab_size": VOCAB,
    }


def mlp_speculator(config: Mapping[str, Any], *, prefix: str = "speculator.") -> Tensors:
    """Tied weights are written once, as safetensors files hold them."""
    tensors: Tensors = {}
    for i in range(config["n_predict"]):
        new = i == 0 or not config["tie_weights"]
        if new:
            tensors[f"emb.{i}.weight"] = random(VOCAB, INNER, seed=10 * i + 1, std=1.0)
            tensors[f"head.{i}.weight"] = random(VOCAB, INNER, seed=10 * i + 2)
            tensors[f"ln.{i}.weight"] = 1 + random(INNER, seed=10 * i + 3)
            tensors[f"ln.{i}.bias"] = random(INNER, seed=10 * i + 4)
        if new or i == 1:
            width = HIDDEN if i == 0 else INNER
            tensors[f"proj.{i}.weight"] = random(INNER, width, seed=10 * i + 5)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def mlp_reference(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], state: Tensor, tokens: list[int]
) -> Tensor:
    """Logits after `tokens`, the first of which was drawn from `state` [hidden]; float64."""

    def rms(x: Tensor) -> Tensor:
        return torch.sqrt((x * x).mean() + 1e-6)

    def weight(kind: str, i: int, leaf: str = "weight") -> Tensor:
        if config["tie_weights"]:
            i = min(i, 1) if kind == "proj" else 0
        return tensors[f"speculator.{kind}.{i}.{leaf}"].double()

    s = state.double()
    if config["scale_input"]:
        s = s / rms(s) / math.sqrt(2)
    w_state = 0.5 ** (0.5 / config["n_predict"])
    w_token = math.sqrt(1 - w_state**2) * math.sqrt(config["inner_dim"] / 2)
    for i, token in enumerate(tokens):
        x = w_state * (weight("proj", i) @ s) + w_token * weight("emb", i)[token]
        x = weight("ln", i) * x / rms(x) + weight("ln", i, "bias")
        s = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return weight("head", len(tokens) - 1) @ s


def save(folder: Path, config: Mapping[str, Any], tensors: Tensors, file: str) -> Path:
    """Writes a checkpoint folder; `file` ends in .safetensors, or torch writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder
