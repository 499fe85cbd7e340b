"""`LlamaOps` by compiled kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.cpu import elementwise
from outrider.engine.cpu.int8 import Int8Weight, available, lay_in_order, rounded
from outrider.engine.cpu.team import Kernel
from outrider.engine.kv_cache.pools import LayerPool
from outrider.engine.layers.linear import Linear, PackedLinear
from outrider.engine.layers.ops import LlamaOps, TorchOps, Use

_TEAM_SIZE = 1 << 14  # elements from which a team of threads is faster


class NumbaOps(LlamaOps):
    """Rounds where `TorchOps` does; compiles its kernels, or loads them from the cache.

    With `int8`, `tune` rounds weights to int8 where the CPU multiplies these faster.
    """

    def __init__(self, dtype: torch.dtype, *, int8: bool = False) -> None:
        self._rounds = int8 and available()
        self._rms_norm = Kernel(elementwise.rms_norm, "4qd", dtype)
        self._qk_norm = Kernel(elementwise.qk_norm, "5qd", dtype)
        self._rotate_and_store = Kernel(elementwise.rotate_and_store, "9q", dtype)
        self._store_context = Kernel(elementwise.store_context, "8q", dtype)
        self._silu_mul = Kernel(elementwise.silu_mul, "3q", dtype)
        self._addresses: dict[tuple[int, ...], array[int]] = {}  # recorded calls read them again

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, hidden = x.shape
        out = torch.empty_like(x)
        team = tokens * hidden >= _TEAM_SIZE
        self._rms_norm(team, tokens, x.data_ptr(), weight.data_ptr(), out.data_ptr(), hidden, eps)
        return out

    def qk_norm_(self, qkv: Tensor, weight: Tensor, eps: float) -> None:
        tokens, stride = qkv.shape
        heads, dim = weight.shape
        team = tokens * heads * dim >= _TEAM_SIZE
        self._qk_norm(team, tokens, qkv.data_ptr(), weight.data_ptr(), stride, heads, dim, eps)

    def rotate_and_store(self, qkv: Tensor, rope: Tensor, slots: Tensor, pool: LayerPool) -> Tensor:
        if pool.scales is not None:
            return TorchOps().rotate_and_store(qkv, rope, slots, pool)
        tokens, stride = qkv.shape
        kv_heads, dim, _ = pool.shape
        heads = stride // dim - 2 * kv_heads
        self._rotate_and_store(
            tokens * stride >= _TEAM_SIZE,
            tokens,
            qkv.data_ptr(),
            rope.data_ptr(),
            slots.data_ptr(),
            pool.keys.data_ptr(),
            pool.values.data_ptr(),
            heads,
            kv_heads,
            dim,
            pool.keys.shape[1],
        )
        return qkv[:, : heads * dim].view(tokens, kv_heads, -1, dim)

    def store_context(
        self, keys_values: Tensor, rope: Tensor, slots: Tensor, pools: Sequence[LayerPool]
    ) -> None:
        if any(pool.scales is not None for pool in pools):
            LlamaOps.store_context(self, keys_values, rope, slots, pools)
            return
        kv_heads, dim, _ = pools[0].shape
        numbers = tuple([p.data_ptr() for pool in pools for p in (pool.keys, pool.values)])
        if (addresses := self._addresses.get(numbers)) is None:
            addresses = self._addresses[numbers] = array("q", numbers)
        self._store_context(
            keys_values.numel() >= _TEAM_SIZE,
            len(keys_values),
            keys_values.data_ptr(),
            rope.data_ptr(),
            slots.data_ptr(),
            addresses.buffer_info()[0],
            len(pools),
            kv_heads,
            dim,
            pools[0].keys.shape[1],
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        team = tokens * width * 4 >= _TEAM_SIZE  # exponentials are slow
        self._silu_mul(team, tokens, gate_up.data_ptr(), out.data_ptr(), width)
        return out

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, linear: Linear, out: Tensor | None = None
    ) -> Tensor:
        weight = rounded(linear)
        if weight is None:
            return LlamaOps.norm_linear(self, x, norm, eps, linear, out)
        if out is None:
            out = x.new_empty(len(x), weight.out_features)
        return weight.of_normed(x, norm, eps, out)

    def mlp(self, x: Tensor, norm: Tensor, eps: float, gate_up: Linear, down: Linear) -> Tensor:
        weight = rounded(down)
        if weight is None:
            return LlamaOps.mlp(self, x, norm, eps, gate_up, down)
        return weight.of_gated(self.norm_linear(x, norm, eps, gate_up), x)

    def tune(self, uses: Sequence[Use]) -> None:
        if not self._rounds:
            return
        linears = dict.fromkeys(use.linear for use in uses if isinstance(use.linear, PackedLinear))
        for linear in linears:
            if linear.int8 is None and linear.in_features % 4 == 0:
                linear.round_to_int8(Int8Weight)
        lay_in_order([each for linear in linears if (each := rounded(linear)) is not None])
