"""Prediction modules around a Llama-like layer, in few operations: Qwen3.5 (dense), Qwen2, Llama.

Qwen3.5's layer becomes Llama's with a gate: its norms multiply by 1 + w, and where only the first
part of a head is turned by its position, the head's numbers are put in another order, in which the
pairs that are turned stand as in a head that is turned whole. Queries and keys alike: their
products are the same.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import TensorSource
from outrider.drafting.hidden_states.heads.llama_layers import LlamaLayer, LlamaShape, Place
from outrider.drafting.hidden_states.heads.mtp_modules import Rotary
from outrider.engine.attention.base import StepAttention
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import LlamaOps, Use
from outrider.engine.model.pack import pack_linear


class LlamaTensors:
    """Implements `TensorSource`: a module's tensors as Llama has them.

    `gated`: Qwen3.5's conventions. `source` takes a module's names (see `mtp_modules`).
    """

    def __init__(
        self, source: TensorSource, shape: LlamaShape, rotary_dim: int, *, gated: bool
    ) -> None:
        self._source = source
        self._head_dim = shape.head_dim
        self._gated = gated
        half, dim = rotary_dim // 2, torch.arange(shape.head_dim)
        rest = dim[rotary_dim:]
        first, second = rest.chunk(2) if len(rest) else (rest, rest)
        self._order = torch.cat((dim[:half], first, dim[half:rotary_dim], second))
        self.folder: Path = source.folder

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str, *shape: int) -> Tensor:
        kind = name.removeprefix("block.").removeprefix("self_attn.")
        if kind == "q_proj.weight" and self._gated:
            return self._turned(self._queries_and_gates(shape)[:, 0]).reshape(shape)
        found = self._source.tensor(name, *shape)
        if self._gated and found.dim() == 1 and not kind.endswith("bias"):
            found = 1 + found.float()
        if kind.startswith(("q_proj", "k_proj", "q_norm", "k_norm")):
            return self._turned(found.view(-1, self._head_dim, *shape[1:])).reshape(shape)
        return found

    def gate(self, *shape: int) -> Tensor:
        """What makes the gate of the attention's output [heads * dim, H]."""
        return self._queries_and_gates(shape)[:, 1].reshape(shape)

    def _queries_and_gates(self, shape: tuple[int, ...]) -> Tensor:
        """[heads, 2, dim, H]"""
        rows, width = shape
        both = self._source.tensor("block.self_attn.q_proj.weight", 2 * rows, width)
        return both.view(-1, 2, self._head_dim, width)

    def _turned(self, heads: Tensor) -> Tensor:
        """Numbers of heads [heads, dim, ...] in the order in which they are turned."""
        return heads.index_select(1, self._order)


class LlamaModule:
    """Implements `MtpModule`, as layer `index` of the pools."""

    capturable = True

    def __init__(
        self,
        tensors: LlamaTensors,
        rope: Tensor,
        shape: LlamaShape,
        place: Place,
        ops: LlamaOps,
        *,
        index: int,
        gated: bool,
    ) -> None:
        """`rope` is a table as `LlamaOps.rotate_and_store` reads it, for all positions."""
        size, queries = shape.hidden_size, shape.num_heads * shape.head_dim

        def norm(name: str) -> Tensor:
            return place.put(tensors.tensor(f"{name}.weight", size))

        self._index = index
        self._ops, self._eps, self._rope = ops, shape.eps, rope
        self._enorm, self._hnorm, self._norm = norm("enorm"), norm("hnorm"), norm("norm")
        self._input_norm = norm("block.input_layernorm")
        weight = place.put(tensors.tensor("eh_proj.weight", size, 2 * size))
        self._eh_proj = pack_linear(weight, None)
        self._layer = LlamaLayer(tensors, "block.", shape, place, ops, input_width=size)
        self._gate: Linear | None = None
        if gated:
            self._gate = pack_linear(place.put(tensors.gate(queries, size)).contiguous(), None)
        self.uses = (
            Use(self._eh_proj, alone=True),
            *(() if self._gate is None else (Use(self._gate, alone=True),)),
            *self._layer.uses(self._input_norm if self._gate is None else None),
        )

    def bind(self, pools: KVPools) -> None:
        self._layer.bind(pools, self._index)

    def forward(
        self, embedded: Tensor, states: Tensor, attention: StepAttention, rows: Tensor | None
    ) -> Tensor:
        ops, eps = self._ops, self._eps
        parts = (
            ops.rms_norm(embedded, self._enorm, eps),
            ops.rms_norm(states.contiguous(), self._hnorm, eps),
        )
        x = self._eh_proj(torch.cat(parts, dim=-1))
        rope = self._rope.index_select(0, attention.batch.positions)
        if self._gate is None:
            qkv = ops.norm_linear(x, self._input_norm, eps, self._layer.qkv)
            return self._layer(qkv, x, rope, attention, None, rows)
        normed = ops.rms_norm(x, self._input_norm, eps)
        gate = self._gate(normed if rows is None else normed.index_select(0, rows)).sigmoid_()
        return self._layer(self._layer.qkv(normed), x, rope, attention, gate, rows)

    def norm(self, outputs: Tensor) -> Tensor:
        return self._ops.rms_norm(outputs, self._norm, self._eps)


def rope_table(rotary: Rotary, shape: LlamaShape, place: Place) -> tuple[Tensor, int]:
    """For all positions [max_model_len, 2, 2, head_dim / 2], and how much of a head is turned.

    The cosines of both halves, then the sines as -sin, sin; what is not turned has 1 and 0.
    """
    positions = torch.arange(shape.max_model_len, device=place.device)[None]
    like = torch.empty(1, dtype=place.dtype, device=place.device)
    with torch.inference_mode():
        cos, sin = (each[0] for each in rotary(like, positions))
    half, turned = shape.head_dim // 2, cos.shape[-1] // 2
    table = torch.zeros(shape.max_model_len, 2, 2, half, dtype=place.dtype, device=place.device)
    table[:, 0] = 1
    table[:, 0, :, :turned] = cos[:, None, :turned]
    table[:, 1, 0, :turned] = -sin[:, :turned]
    table[:, 1, 1, :turned] = sin[:, :turned]
    return table, 2 * turned
