"""Reads a Llama's weights as plain arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

Floats = NDArray[np.float32]
Matrix = NDArray[np.uint16] | NDArray[np.float32]
"""float32, or the bits of bfloat16."""


class Weights(NamedTuple):
    """The weights, with matrices [out, in]; those of all layers are stacked."""

    embedding: Matrix  # [vocab, hidden]
    head: Matrix  # [vocab, hidden]
    norm: Floats  # [hidden]
    input_norm: Floats  # [layers, hidden]
    qkv: Matrix  # [layers, (heads + 2 * kv_heads) * dim, hidden]
    qkv_bias: Floats  # [layers, (heads + 2 * kv_heads) * dim]
    o: Matrix  # [layers, hidden, heads * dim]
    post_norm: Floats  # [layers, hidden]
    gate_up: Matrix  # [layers, 2 * intermediate, hidden]
    down: Matrix  # [layers, hidden, intermediate]
    cos: Floats  # [positions, dim / 2]
    sin: Floats  # [positions, dim / 2]
    eps: float


def read_weights(folder: Path, model: nn.Module, max_model_len: int) -> Weights:
    """Read the checkpoint in `folder` of `model`, which is without weights.

    Raises `KeyError` where a tensor is missing.
    """
    parts: Any = model
    config = parts.config
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                tensors[name] = file.get_tensor(name).float()

    def stacked(*names: str) -> Tensor:  # of all layers; those of one layer joined
        layers = range(config.num_hidden_layers)
        prefixes = [f"model.layers.{i}." for i in layers]
        return torch.stack([torch.cat([tensors[p + name] for name in names]) for p in prefixes])

    projections = [f"self_attn.{name}_proj." for name in "qkv"]
    embedding = tensors["model.embed_tokens.weight"]
    matrices = [
        stacked(*(name + "weight" for name in projections)),
        stacked("self_attn.o_proj.weight"),
        stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        stacked("mlp.down_proj.weight"),
        embedding,
    ]
    if not config.tie_word_embeddings:
        matrices.append(tensors["lm_head.weight"])
    qkv, o, gate_up, down, *ends = _packed(matrices)
    bias = torch.zeros(qkv.shape[:2])
    if parts.model.layers[0].self_attn.q_proj.bias is not None:
        bias = stacked(*(name + "bias" for name in projections))
    rotary = type(parts.model.rotary_emb)(config=config)
    with torch.inference_mode():
        cos, sin = rotary(embedding[:1], torch.arange(max_model_len)[None])
    half = cos.shape[-1] // 2  # the halves are equal
    return Weights(
        embedding=ends[0],
        head=ends[-1],
        norm=tensors["model.norm.weight"].numpy(),
        input_norm=stacked("input_layernorm.weight").numpy(),
        qkv=qkv,
        qkv_bias=bias.numpy(),
        o=o,
        post_norm=stacked("post_attention_layernorm.weight").numpy(),
        gate_up=gate_up,
        down=down,
        cos=cos[0, :, :half].contiguous().numpy(),
        sin=sin[0, :, :half].contiguous().numpy(),
        eps=float(config.rms_norm_eps),
    )


def _packed(matrices: list[Tensor]) -> list[Matrix]:
    """Return the matrices side by side in one block on huge pages.

    They are the bits of bfloat16 if all are representable so, else float32.
    """
    flat = torch.cat([matrix.flatten() for matrix in matrices])
    short = flat.bfloat16()
    block: Matrix = flat.numpy()
    if torch.equal(short.float(), flat):
        block = short.view(torch.uint16).numpy()
    block = block.copy()  # in NumPy's memory, which asks for huge pages
    packed: list[Matrix] = []
    for matrix in matrices:
        packed.append(block[: matrix.numel()].reshape(matrix.shape))
        block = block[matrix.numel() :]
    return packed
