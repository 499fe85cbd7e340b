"""Small random EAGLE and EAGLE-3 checkpoints, and a target, with the public names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB_SIZE = 97
HIDDEN_SIZE = 32
NUM_LAYERS = 9  # of the target
_HEADS, _KV_HEADS, _HEAD_DIM, _INNER = 4, 2, 8, 48
LLAMA: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": _INNER,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
}

Tensors = dict[str, Tensor]
Write = Callable[[Mapping[str, Tensor], Path], None]


def save_target(folder: Path, *, hidden_size: int = HIDDEN_SIZE, tied: bool = False) -> Path:
    """Only what a draft module shares with it: config.json, embedding and head."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {"model.embed_tokens.weight": _normal(generator, VOCAB_SIZE, hidden_size)}
    if not tied:
        tensors["lm_head.weight"] = _normal(generator, VOCAB_SIZE, hidden_size)
    save_file(tensors, folder / "model.safetensors")
    config = {**LLAMA, "hidden_size": hidden_size, "num_hidden_layers": NUM_LAYERS}
    _save_config(folder, {**config, "rope_theta": 500.0, "tie_word_embeddings": tied})
    return folder


def save_bin(tensors: Mapping[str, Tensor], folder: Path) -> None:
    torch.save(dict(tensors), folder / "pytorch_model.bin")


def save_safetensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    save_file(dict(tensors), folder / "model.safetensors")


def save_head(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], write: Write = save_bin
) -> Path:
    folder.mkdir(parents=True)
    write(tensors, folder)
    _save_config(folder, config)
    return folder


def eagle_tensors(*, bias: bool = True, num_layers: int = 1) -> Tensors:
    """As `yuhuili/EAGLE-*`: without a norm before the first layer, and without a head."""
    generator = torch.Generator().manual_seed(2)
    tensors = {"fc.weight": _normal(generator, HIDDEN_SIZE, 2 * HIDDEN_SIZE)}
    if bias:
        tensors["fc.bias"] = _normal(generator, HIDDEN_SIZE)
    for i in range(num_layers):
        tensors |= _layer(generator, f"layers.{i}.", HIDDEN_SIZE, HIDDEN_SIZE)
        if i:
            tensors[f"layers.{i}.input_layernorm.weight"] = _norm(generator, HIDDEN_SIZE)
    tensors["embed_tokens.weight"] = _normal(generator, VOCAB_SIZE, HIDDEN_SIZE)  # not to be used
    return tensors


def eagle3_tensors(
    *,
    layer: str = "midlayer.",
    hidden_size: int = HIDDEN_SIZE,
    target_hidden: int = HIDDEN_SIZE,
    draft_vocab: int | None = 40,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 1,
    embedding: bool = False,
) -> Tensors:
    """As `yuhuili/EAGLE3-*`; with `layer` "layers.0." and an embedding as `speculators` saves."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "fc.weight": _normal(generator, hidden_size, 3 * target_hidden),
        "norm.weight": _norm(generator, hidden_size),
        f"{layer}input_layernorm.weight": _norm(generator, hidden_size),
        f"{layer}hidden_norm.weight": _norm(generator, hidden_size),
        **_layer(generator, layer, hidden_size, 2 * hidden_size),
        "lm_head.weight": _normal(generator, draft_vocab or vocab_size, hidden_size),
    }
    for i in range(1, num_layers):
        tensors |= _layer(generator, f"layers.{i}.", hidden_size, hidden_size)
        tensors[f"layers.{i}.input_layernorm.weight"] = _norm(generator, hidden_size)
    if draft_vocab is not None:
        known = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = known - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, known, True)
    if embedding:
        tensors["embed_tokens.weight"] = _normal(generator, vocab_size, hidden_size)
    return tensors


def features(num_rows: int, width: int, seed: int = 0) -> Tensor:
    """Made-up states: bfloat16 [num_rows, width]."""
    return _normal(torch.Generator().manual_seed(seed), num_rows, width).mul_(8).bfloat16()


def as_bytes(rows: Tensor) -> bytes:
    """As they cross the wire."""
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def _layer(generator: torch.Generator, prefix: str, hidden: int, width: int) -> Tensors:
    sizes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, width),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, width),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, width),
        "self_attn.o_proj": (hidden, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (_INNER, hidden),
        "mlp.up_proj": (_INNER, hidden),
        "mlp.down_proj": (hidden, _INNER),
    }
    tensors = {f"{prefix}{n}.weight": _normal(generator, *size) for n, size in sizes.items()}
    tensors[f"{prefix}post_attention_layernorm.weight"] = _norm(generator, hidden)
    return tensors


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator) * 0.2


def _norm(generator: torch.Generator, size: int) -> Tensor:
    return 1 + _normal(generator, size)


def _save_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
