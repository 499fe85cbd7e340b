"""Products of int8 weights and few rows on tensor cores that multiply int8.

Both operands come from shared memory as they are: `tile_kernel` makes bfloat16 of every weight,
which takes longer than to read it. So x becomes two int8, 128 * high + low, once for all programs:
finer than bfloat16 but where numbers are far below the largest of their row. Sums are exact.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.cuda.kernels.prefetch import prefetch
from outrider.engine.cuda.kernels.products import normed, split, unit_of
from outrider.engine.cuda.kernels.tiles import end_tile


@triton.jit
def planes_kernel(
    x_ptr,  # [rows, K]
    norm_ptr,  # [K], read if NORM
    planes_ptr,  # int8 [2, rows, K]: high, low
    unit_ptr,  # float32 [rows]
    K,
    eps,  # of the norm
    NORM: tl.constexpr,  # x is x over its root mean square, times norm
    BLOCK_K: tl.constexpr,  # at least K
    PDL: tl.constexpr,
):
    row, rows = tl.program_id(0), tl.num_programs(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    if NORM:
        norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
        x = normed(x, scale, norm, x_ptr.dtype.element_ty)
    unit = unit_of(tl.max(tl.abs(x), axis=0))
    high, low = split(x, unit)
    here = planes_ptr + row * K + k
    tl.store(here, high.to(tl.int8), mask=inside)
    tl.store(here + rows * K, low.to(tl.int8), mask=inside)
    tl.store(unit_ptr + row, unit)


@triton.jit(do_not_specialize=["rows"])
def plane_tile_kernel(
    planes_ptr,  # int8 [2, rows, K]
    unit_ptr,  # float32 [rows]
    weight_ptr,  # int8 [N, K]; if GATED [2 * N, K], the gates first
    scale_ptr,  # float32 [N] or [2 * N]
    out_ptr,  # [rows, N]
    partial_ptr,  # this and arrived_ptr as of `tile_kernel`
    arrived_ptr,
    rows,
    N,
    K,
    share,  # of K, a multiple of BLOCK_K: K / share programs make a tile
    GATED: tl.constexpr,  # the output is silu(gate) * up
    ADD: tl.constexpr,  # to what is in out
    ROWS: tl.constexpr,  # at least rows, a multiple of 16
    BLOCK_N: tl.constexpr,  # divides N
    BLOCK_K: tl.constexpr,  # at least 128
    STAGES: tl.constexpr,  # blocks of weights on their way
    PDL: tl.constexpr,
):
    splits = K // share
    n = (tl.program_id(0) // splits * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    first = tl.program_id(0) % splits * share
    k = first + tl.arange(0, BLOCK_K)
    weight_here = weight_ptr + n[:, None] * K + k[None, :]
    up_here = weight_here + N.to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        line = first + 128 * tl.arange(0, BLOCK_K // 128)
        early = weight_ptr + n[:, None] * K + line[None, :]
        prefetch(early, 128)
        if GATED:
            prefetch(early + N.to(tl.int64) * K, 128)
        gdc_wait()

    row = tl.arange(0, ROWS)
    present = row < rows
    high_here = planes_ptr + row[:, None] * K + k[None, :]
    low_here = high_here + rows * K
    high_sums = tl.zeros([BLOCK_N, ROWS], tl.int32)
    low_sums = tl.zeros([BLOCK_N, ROWS], tl.int32)
    up_high_sums = tl.zeros([BLOCK_N, ROWS], tl.int32)
    up_low_sums = tl.zeros([BLOCK_N, ROWS], tl.int32)
    for start in tl.range(0, share, BLOCK_K, num_stages=STAGES):
        high = tl.trans(tl.load(high_here + start, mask=present[:, None], other=0))
        low = tl.trans(tl.load(low_here + start, mask=present[:, None], other=0))
        weight = tl.load(weight_here + start, eviction_policy="evict_first")
        high_sums = tl.dot(weight, high, high_sums, out_dtype=tl.int32)
        low_sums = tl.dot(weight, low, low_sums, out_dtype=tl.int32)
        if GATED:
            up_weight = tl.load(up_here + start, eviction_policy="evict_first")
            up_high_sums = tl.dot(up_weight, high, up_high_sums, out_dtype=tl.int32)
            up_low_sums = tl.dot(up_weight, low, up_low_sums, out_dtype=tl.int32)
    unit = tl.load(unit_ptr + row, mask=present, other=0.0)[None, :]
    sums = (128.0 * high_sums.to(tl.float32) + low_sums.to(tl.float32)) * unit
    up_sums = (128.0 * up_high_sums.to(tl.float32) + up_low_sums.to(tl.float32)) * unit
    end_tile(
        out_ptr + row[None, :] * N + n[:, None],
        present[None, :],
        scale_ptr + n[:, None],
        scale_ptr + N + n[:, None],
        sums,
        up_sums,
        partial_ptr,
        arrived_ptr,
        tl.arange(0, BLOCK_N)[:, None] * ROWS + row[None, :],
        splits,
        GATED,
        ADD,
        True,
    )
