"""`LlamaOps` as Triton kernels: one launch each, no allocation but the results'."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.kernels.pointwise import (
    qk_norm_kernel,
    rms_norm_kernel,
    rotate_and_store_kernel,
    silu_mul_kernel,
)
from outrider.engine.kv_cache import LayerPool, PageMajorPool

_HEADS_PER_PROGRAM = 4  # 512 numbers per program at 128 a head: a warp with 16 numbers a thread
_SILU_BLOCK = 1024


class TritonOps:
    """Implements `LlamaOps` over page-major pools. Safe to capture in a CUDA graph.

    A token whose slot is negative stores no key and no value: padding rows are inert.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, hidden = x.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(tokens,)](
            x, weight, out, x.stride(0), hidden, eps, block, num_warps=_warps(block)
        )
        return out

    def qk_norm_(self, qkv: Tensor, weight: Tensor, eps: float) -> None:
        heads, dim = weight.shape
        grid = (len(qkv), triton.cdiv(heads, _HEADS_PER_PROGRAM))
        qk_norm_kernel[grid](
            qkv,
            weight,
            qkv.stride(0),
            heads,
            eps,
            dim,
            triton.next_power_of_2(dim),
            _HEADS_PER_PROGRAM,
            num_warps=1,
        )

    def rotate_and_store(self, qkv: Tensor, rope: Tensor, slots: Tensor, pool: LayerPool) -> Tensor:
        assert isinstance(pool, PageMajorPool)
        tokens, width = qkv.shape
        kv_heads, dim, _ = pool.shape
        heads = width // dim - 2 * kv_heads
        grid = (tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS_PER_PROGRAM))
        rotate_and_store_kernel[grid](
            qkv,
            rope,
            slots,
            pool.keys,
            pool.values,
            qkv.stride(0),
            heads,
            kv_heads,
            dim // 2,
            triton.next_power_of_2(dim // 2),
            _HEADS_PER_PROGRAM,
            num_warps=1,
        )
        return qkv[:, : heads * dim].view(tokens, kv_heads, -1, dim)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        out = gate_up.new_empty(tokens, width // 2)
        grid = (tokens, triton.cdiv(width // 2, _SILU_BLOCK))
        silu_mul_kernel[grid](gate_up, out, width // 2, _SILU_BLOCK, num_warps=4)
        return out


def _warps(block: int) -> int:
    """16 numbers a thread, at most 16 warps."""
    return max(1, min(16, block // 512))
