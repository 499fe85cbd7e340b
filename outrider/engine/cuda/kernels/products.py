"""Products of few rows: every weight is read once, and what lies around a product is done in it.

Weights, or the first of them, are on their way before a program looks at x: with a programmatic
dependent launch that is while the kernel before still runs, so that the memory never rests between
products.

`strip_kernel` holds some rows of the weight in registers and multiplies number by number, which for
one or two rows of x is fastest; it norms x itself, because that costs less than a launch.
`tile_kernel` multiplies on tensor cores, which takes sixteen rows in the time of one. There x is
large enough for its way from the cache to count, so programs take many rows of the weight and
share the inner dimension; the last of them to end adds up what all have left.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.cuda.kernels.pointwise import silu_mul
from outrider.engine.cuda.kernels.prefetch import prefetch


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
        sums = silu_mul(gate, up, dtype)
    here = out_ptr + row[None, :] * N + n[:, None]
    if ADD:
        sums += tl.load(here, mask=present[None, :], other=0.0).to(tl.float32)
    tl.store(here, sums.to(dtype), mask=present[None, :])


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]; if GATED [2 * N, K], the gates first
    out_ptr,  # [rows, N]
    partial_ptr,  # float32 [tiles, splits, 2 if GATED, ROWS, BLOCK_N], written if splits > 1
    arrived_ptr,  # int32 [tiles], zeros before and after
    rows,
    N,
    K,
    share,  # of K, a multiple of BLOCK_K: K / share programs make a tile
    GATED: tl.constexpr,  # the output is silu(gate) * up
    ADD: tl.constexpr,  # to what is in out
    ROWS: tl.constexpr,  # at least rows, a multiple of 16
    BLOCK_N: tl.constexpr,  # divides N
    BLOCK_K: tl.constexpr,  # at least 64
    STAGES: tl.constexpr,  # blocks of weights on their way
    PDL: tl.constexpr,
):
    splits = K // share
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    n = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = split * share + tl.arange(0, BLOCK_K)
    weight_here = weight_ptr + n[None, :] * K + k[:, None]
    up_here = weight_here + N.to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        line = split * share + 64 * tl.arange(0, BLOCK_K // 64)
        early = weight_ptr + n[:, None] * K + line[None, :]
        prefetch(early, 64)
        if GATED:
            prefetch(early + N.to(tl.int64) * K, 64)
        gdc_wait()

    row = tl.arange(0, ROWS)
    present = (row < rows)[:, None]
    x_here = x_ptr + row[:, None] * K + k[None, :]
    dtype = x_ptr.dtype.element_ty
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up_sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(0, share, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_here + start, mask=present, other=0.0)
        weight = tl.load(weight_here + start, eviction_policy="evict_first")
        sums = tl.dot(x, weight, sums)
        if GATED:
            up_weight = tl.load(up_here + start, eviction_policy="evict_first")
            up_sums = tl.dot(x, up_weight, up_sums)

    if splits > 1:
        kinds: tl.constexpr = 2 if GATED else 1
        size: tl.constexpr = ROWS * BLOCK_N
        at = row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        left = partial_ptr + tile * (splits * kinds * size) + at
        tl.store(left + split * kinds * size, sums, mask=present)
        if GATED:
            tl.store(left + (split * kinds + 1) * size, up_sums, mask=present)
        tl.debug_barrier()  # all threads have written before one says so
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") < splits - 1:
            return
        tl.store(arrived_ptr + tile, 0)
        sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
        up_sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for i in range(splits):  # always in this order
            sums += tl.load(left + i * kinds * size, mask=present, other=0.0, cache_modifier=".cg")
            if GATED:
                up_sums += tl.load(
                    left + (i * kinds + 1) * size, mask=present, other=0.0, cache_modifier=".cg"
                )
    if GATED:  # rounded as by `silu_mul_kernel`
        gate = sums.to(dtype).to(tl.float32)
        up = up_sums.to(dtype).to(tl.float32)
        sums = silu_mul(gate, up, dtype)
    here = out_ptr + row[:, None] * N + n[None, :]
    if ADD:
        sums += tl.load(here, mask=present, other=0.0).to(tl.float32)
    tl.store(here, sums.to(dtype), mask=present)
