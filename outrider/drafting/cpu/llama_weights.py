"""Lays a loaded Llama's weights out as plain arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.layers.linear import Linear, PackedLinear
from outrider.engine.model.llama import FusedLlama

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


def copy_weights(network: FusedLlama) -> Weights:
    """Return copies of the weights of a float32 model on a CPU."""
    layers = network.layers
    qkv_bias = torch.stack([_bias(layer.qkv) for layer in layers])
    matrices = [
        torch.stack([_dense(layer.qkv) for layer in layers]),
        torch.stack([_dense(layer.o) for layer in layers]),
        torch.stack([_dense(layer.gate_up) for layer in layers]),
        torch.stack([_dense(layer.down) for layer in layers]),
        network.embedding,
    ]
    head = _dense(network.output_layer)
    if not torch.equal(head, network.embedding):
        matrices.append(head)
    qkv, o, gate_up, down, *ends = _packed(matrices)
    return Weights(
        embedding=ends[0],
        head=ends[-1],
        norm=network.norm.numpy(),
        input_norm=torch.stack([layer.input_norm for layer in layers]).numpy(),
        qkv=qkv,
        qkv_bias=qkv_bias.numpy(),
        o=o,
        post_norm=torch.stack([layer.post_norm for layer in layers]).numpy(),
        gate_up=gate_up,
        down=down,
        cos=network.rope[:, 0, 0].contiguous().numpy(),
        sin=network.rope[:, 1, 1].contiguous().numpy(),
        eps=float(network.eps),
    )


def _dense(linear: Linear) -> Tensor:
    assert isinstance(linear, PackedLinear)
    return linear.dense_weight()


def _bias(linear: Linear) -> Tensor:
    assert isinstance(linear, PackedLinear)
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias


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
