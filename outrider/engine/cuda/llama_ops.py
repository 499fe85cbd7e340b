"""`LlamaOps` as Triton kernels, one launch each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from outrider.engine.attention.base import AttentionParams, StepAttention
from outrider.engine.cuda.attention.triton import TritonPagedAttention
from outrider.engine.cuda.gemm.autotune import tune
from outrider.engine.cuda.gemm.linear import FewRowsLinear
from outrider.engine.cuda.gemm.quantized import QuantizedLinear
from outrider.engine.cuda.gemm.tilings import Small, Tiling
from outrider.engine.cuda.kernels.pointwise import (
    qk_norm_kernel,
    rms_norm_kernel,
    rotate_and_store_kernel,
    silu_mul_kernel,
)
from outrider.engine.cuda.launch import launch_options, row_warps
from outrider.engine.kv_cache.pools import LayerPool, PageMajorPool
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import LlamaOps, Use

_HEADS_PER_PROGRAM = 4  # 512 numbers per program at 128 a head: a warp with 16 numbers a thread
_SILU_BLOCK = 1024
_EPS = 1e-5  # of norms while the autotuner measures


class TritonOps(LlamaOps):
    """Implements `LlamaOps` over page-major pools. A CUDA graph can capture it.

    A token with a negative slot, such as padding, stores no key and no value. With `int8` weights
    are read as int8 where that is faster.
    """

    def __init__(self, *, int8: bool = False) -> None:
        self._int8 = int8

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, hidden = x.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        block = triton.next_power_of_2(hidden)
        sizes = (x.stride(0), hidden, eps, block)
        rms_norm_kernel[(tokens,)](
            x, weight, out, *sizes, num_warps=row_warps(block), **launch_options()
        )
        return out

    def qk_norm_(self, qkv: Tensor, weight: Tensor, eps: float) -> None:
        heads, dim = weight.shape
        grid = (len(qkv), triton.cdiv(heads, _HEADS_PER_PROGRAM))
        sizes = (qkv.stride(0), heads, eps, dim, triton.next_power_of_2(dim), _HEADS_PER_PROGRAM)
        qk_norm_kernel[grid](qkv, weight, *sizes, num_warps=1, **launch_options())

    def rotate_and_store(self, qkv: Tensor, rope: Tensor, slots: Tensor, pool: LayerPool) -> Tensor:
        assert isinstance(pool, PageMajorPool)
        tokens, width = qkv.shape
        kv_heads, dim, _ = pool.shape
        heads = width // dim - 2 * kv_heads
        grid = (tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS_PER_PROGRAM))
        half = dim // 2
        scales = slots if pool.scales is None else pool.scales  # the former is not read
        rotate_and_store_kernel[grid](
            *(qkv, rope, slots, pool.keys, pool.values, scales),
            *(qkv.stride(0), heads, kv_heads),
            *(half, triton.next_power_of_2(half), _HEADS_PER_PROGRAM, pool.scales is not None),
            num_warps=1,
            **launch_options(),
        )
        return qkv[:, : heads * dim].view(tokens, kv_heads, -1, dim)

    def attend_new(
        self,
        qkv: Tensor,
        rope: Tensor,
        attention: StepAttention,
        pool: LayerPool,
        params: AttentionParams,
    ) -> Tensor:
        kv_heads, dim, _ = pool.shape
        group = qkv.shape[1] // (kv_heads * dim) - 2
        if isinstance(attention, TritonPagedAttention) and attention.takes_new(group, params):
            query = qkv[:, : kv_heads * group * dim].view(len(qkv), kv_heads, group, dim)
            return attention.attend_new(query, rope, pool, params)
        return super().attend_new(qkv, rope, attention, pool, params)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        out = gate_up.new_empty(tokens, width // 2)
        grid = (tokens, triton.cdiv(width // 2, _SILU_BLOCK))
        silu_mul_kernel[grid](
            gate_up, out, width // 2, _SILU_BLOCK, num_warps=4, **launch_options()
        )
        return out

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, linear: Linear, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(linear, FewRowsLinear) and (tiling := linear.choice(len(x))) is not None:
            if out is None:
                out = x.new_empty(len(x), linear.out_features)
            return self._fused(linear, tiling, x, norm, eps, out)
        return super().norm_linear(x, norm, eps, linear, out)

    def norm_gated(self, x: Tensor, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
        if isinstance(gate_up, FewRowsLinear) and (tiling := gate_up.choice(len(x))) is not None:
            out = x.new_empty(len(x), gate_up.out_features // 2)
            return self._fused(gate_up, tiling, x, norm, eps, out, gated=True)
        return super().norm_gated(x, norm, eps, gate_up)

    def mlp(self, x: Tensor, norm: Tensor, eps: float, gate_up: Linear, down: Linear) -> Tensor:
        if isinstance(gate_up, QuantizedLinear) and isinstance(down, QuantizedLinear):
            tiling, next_tiling = (each.choice(len(x)) for each in (gate_up, down))
            if isinstance(tiling, Small) and isinstance(next_tiling, Small):
                both = x.new_empty(len(x), gate_up.out_features)
                return down.add_gated(gate_up.fused(tiling, x, both, norm, eps), x)
        return super().mlp(x, norm, eps, gate_up, down)

    def _fused(
        self,
        linear: FewRowsLinear,
        tiling: Tiling,
        x: Tensor,
        norm: Tensor,
        eps: float,
        out: Tensor,
        *,
        gated: bool = False,
    ) -> Tensor:
        if tiling.norms:
            return linear.fused(tiling, x, out, norm, eps, gated=gated)
        return linear.fused(tiling, self.rms_norm(x, norm, eps), out, gated=gated)

    def tune(self, uses: Sequence[Use]) -> None:
        tune(uses, self.product, int8=self._int8)

    def product(self, use: Use, x: Tensor, out: Tensor) -> Tensor:
        """Compute a product of x [rows, in] as a step does; may write to `out` [rows, out]."""
        if use.norm is None:
            return use.linear(x, out) if use.alone else use.linear.add(x, out)
        if use.gated:
            return self.norm_gated(x, use.norm, _EPS, use.linear)
        return self.norm_linear(x, use.norm, _EPS, use.linear, out)
