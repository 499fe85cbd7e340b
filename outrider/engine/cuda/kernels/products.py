"""Products of few rows: every weight is read once, and what lies around a product is done in it.

A program holds a strip of the weight, some columns of the output over the whole inner dimension,
in registers. It asks for all of it before it looks at x: with a programmatic dependent launch that
is while the kernel before still runs, so that the memory never rests between products. Each program
norms the rows of x itself, because for one or two of them that costs less than a launch.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["rows"])  # what is compiled at start-up serves all
def strip_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]; if GATED [2 * N, K], the gates first
    norm_ptr,  # [K], read if NORM
    out_ptr,  # [rows, N]
    rows,
    N,
    K,
    eps,  # of the norm
    NORM: tl.constexpr,  # x is x over its root mean square, times norm
    GATED: tl.constexpr,  # the output is silu(gate) * up
    ADD: tl.constexpr,  # to what is in out
    ROWS: tl.constexpr,  # at least rows
    BLOCK_N: tl.constexpr,  # divides N
    BLOCK_K: tl.constexpr,  # at least K
    PDL: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    inside = k < K
    # Every weight is used once: it need not stay in the cache.
    weight = tl.load(
        weight_ptr + n[:, None, None] * K + k, mask=inside, other=0.0, eviction_policy="evict_first"
    )
    if GATED:
        up_weight = tl.load(
            weight_ptr + (N + n)[:, None, None] * K + k,
            mask=inside,
            other=0.0,
            eviction_policy="evict_first",
        )
    if NORM:
        norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    row = tl.arange(0, ROWS)
    present = row < rows
    x = tl.load(x_ptr + row[None, :, None] * K + k, mask=inside & present[None, :, None], other=0.0)
    dtype = x_ptr.dtype.element_ty
    x = x.to(tl.float32)
    if NORM:  # rounded as by `rms_norm_kernel`
        scale = tl.rsqrt(tl.sum(x * x, axis=2, keep_dims=True) / K + eps)
        x = ((x * scale).to(dtype).to(tl.float32) * norm).to(dtype).to(tl.float32)
    sums = tl.sum(weight.to(tl.float32) * x, axis=2)  # [BLOCK_N, ROWS]
    if GATED:  # rounded as by `silu_mul_kernel`
        gate = sums.to(dtype).to(tl.float32)
        up = tl.sum(up_weight.to(tl.float32) * x, axis=2).to(dtype).to(tl.float32)
        sums = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    here = out_ptr + row[None, :] * N + n[:, None]
    if ADD:
        sums += tl.load(here, mask=present[None, :], other=0.0).to(tl.float32)
    tl.store(here, sums.to(dtype), mask=present[None, :])
