"""Products of one or two rows whose weights lie in registers, and x as two int8.

A program loads its weights before it waits for x. With programmatic dependent launch that is while
the kernel before still runs, so that memory never idles between products.

An int8 weight has a scale for every row. `int8_gemv_kernel` multiplies four numbers in one
instruction, because converting each to a float takes longer than reading two bytes. So x becomes
two int8, 256 * high + low, which is finer than bfloat16 except for numbers far below the largest of
their row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.cuda.kernels.pointwise import silu_mul


@triton.jit
def normed(x, scale, weight, dtype: tl.constexpr):
    """Norm x with its row's scale, rounded as by `rms_norm_kernel`; float32."""
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def finish(
    here, present, sums, up_sums, dtype: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr
):
    """Store the outputs where they are `present`."""
    if GATED:  # rounded as by `silu_mul_kernel`
        gate = sums.to(dtype).to(tl.float32)
        up = up_sums.to(dtype).to(tl.float32)
        sums = silu_mul(gate, up, dtype)
    if ADD:
        sums += tl.load(here, mask=present, other=0.0).to(tl.float32)
    tl.store(here, sums.to(dtype), mask=present)


@triton.jit(do_not_specialize=["rows"])  # one compilation for all numbers of rows
def gemv_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]; if GATED [2 * N, K], the gates first
    scale_ptr,  # float32 [N] or [2 * N], read if SCALED
    norm_ptr,  # [K], read if NORM
    out_ptr,  # [rows, N]
    rows,
    N,
    K,
    eps,  # of the norm
    NORM: tl.constexpr,  # x is x over its root mean square, times norm
    GATED: tl.constexpr,  # the output is silu(gate) * up
    ADD: tl.constexpr,  # to the contents of out
    SCALED: tl.constexpr,  # each row of the weight has a scale
    ROWS: tl.constexpr,  # at least rows
    BLOCK_N: tl.constexpr,  # divides N
    BLOCK_K: tl.constexpr,  # at least K
    PDL: tl.constexpr,
):
    """Multiply some rows of the weight, held in registers, number by number."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    inside = k < K
    # Every weight is used once, so it need not stay in the cache.
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
    if SCALED:
        scale = tl.load(scale_ptr + n)[:, None]
        if GATED:
            up_scale = tl.load(scale_ptr + N + n)[:, None]
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
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, axis=2, keep_dims=True) / K + eps)
        x = normed(x, inverse, norm, dtype)
    sums = tl.sum(weight.to(tl.float32) * x, axis=2)  # [BLOCK_N, ROWS]
    up_sums = sums
    if GATED:
        up_sums = tl.sum(up_weight.to(tl.float32) * x, axis=2)
    if SCALED:
        sums *= scale
        if GATED:
            up_sums *= up_scale
    here = out_ptr + row[None, :] * N + n[:, None]
    finish(here, present[None, :], sums, up_sums, dtype, GATED, ADD)


@triton.jit
def _dot4(a, b, ASM: tl.constexpr):
    """Sum the products of four int8 each, in an int32."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    sums = ((a << 24) >> 24) * ((b << 24) >> 24)
    for left in tl.static_range(0, 24, 8):
        sums += ((a << left) >> 24) * ((b << left) >> 24)
    return sums


@triton.jit
def unit_of(largest):
    """Return the unit of rows whose largest number is 127 * 256 units."""
    return tl.maximum(largest, 1e-30) * (1.0 / 32512.0)


@triton.jit
def split(x, unit):
    """Split x into int8 `high` and `low`: x is (256 * high + low) * unit."""
    # The last bits of 1.5 * 2**23 plus a small number are the integer next to it. This is faster
    # than a conversion. The 128 more make `high` round to the nearest.
    fixed = (x * (1.0 / unit) + 12583040.0).to(tl.int32, bitcast=True)
    return (fixed >> 8).to(tl.int8), (fixed ^ 128).to(tl.int8)


@triton.jit
def _sum_int8(weight, high, low, ASM: tl.constexpr):
    """Sum products with 256 * high + low over the last axis: float32."""
    of_high = tl.sum(_dot4(weight, high, ASM), axis=2).to(tl.float32)
    return 256.0 * of_high + tl.sum(_dot4(weight, low, ASM), axis=2).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def int8_gemv_kernel(
    x_ptr,  # [rows, 4 * K]; if APART int32 [2, rows, K]: high, low, of four int8 each
    unit_ptr,  # float32 [rows], read if APART
    weight_ptr,  # int32 [N, K], of four int8 each; if GATED [2 * N, K], the gates first
    scale_ptr,  # float32 [N] or [2 * N]
    norm_ptr,  # [4 * K], read if NORM
    out_ptr,  # [rows, N]
    rows,
    N,
    K,
    eps,  # of the norm
    NORM: tl.constexpr,  # x is x over its root mean square, times norm
    GATED: tl.constexpr,  # the output is silu(gate) * up
    ADD: tl.constexpr,  # to the contents of out
    APART: tl.constexpr,  # `split_kernel` has normed and split x
    ROWS: tl.constexpr,  # at least rows
    BLOCK_N: tl.constexpr,  # divides N
    BLOCK_K: tl.constexpr,  # at least K
    ASM: tl.constexpr,  # on a device, not interpreted
    PDL: tl.constexpr,
):
    """Multiply some rows of an int8 weight, four numbers at a time."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    word = tl.arange(0, BLOCK_K)
    here = n[:, None, None] * K + word[None, None, :]
    inside = word < K
    weight = tl.load(
        weight_ptr + here, mask=inside[None, None, :], other=0, eviction_policy="evict_first"
    )
    scale = tl.load(scale_ptr + n)[:, None]
    if GATED:
        up_weight = tl.load(
            weight_ptr + N.to(tl.int64) * K + here,
            mask=inside[None, None, :],
            other=0,
            eviction_policy="evict_first",
        )
        up_scale = tl.load(scale_ptr + N + n)[:, None]
    if not APART:
        byte = tl.arange(0, 4)
        number = (4 * word[:, None] + byte[None, :])[None, :, :]
        if NORM:
            norm = tl.load(norm_ptr + number, mask=inside[None, :, None], other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    row = tl.arange(0, ROWS)
    present = row < rows
    dtype = out_ptr.dtype.element_ty
    if APART:
        here = x_ptr + row[:, None] * K + word[None, :]
        there = present[:, None] & inside[None, :]
        high = tl.load(here, mask=there, other=0)[None, :, :]  # [1, ROWS, BLOCK_K]
        low = tl.load(here + rows * K, mask=there, other=0)[None, :, :]
        unit = tl.load(unit_ptr + row, mask=present, other=0.0)
    else:
        x = tl.load(
            x_ptr + row[:, None, None] * (4 * K) + number,
            mask=inside[None, :, None] & present[:, None, None],
            other=0.0,
        ).to(tl.float32)  # [ROWS, BLOCK_K, 4]
        if NORM:
            squares = tl.sum(tl.sum(x * x, axis=2), axis=1)
            inverse = tl.rsqrt(squares / (4 * K) + eps)[:, None, None]
            x = normed(x, inverse, norm, dtype)
        unit = unit_of(tl.max(tl.max(tl.abs(x), axis=2), axis=1))
        high, low = split(x, unit[:, None, None])
        at = 8 * byte[None, None, :]
        high = tl.sum((high.to(tl.int32) & 255) << at, axis=2)[None, :, :]
        low = tl.sum((low.to(tl.int32) & 255) << at, axis=2)[None, :, :]

    unit = unit[None, :]
    sums = _sum_int8(weight, high, low, ASM) * (scale * unit)  # [BLOCK_N, ROWS]
    up_sums = sums
    if GATED:
        up_sums = _sum_int8(up_weight, high, low, ASM) * (up_scale * unit)
    there = out_ptr + row[None, :] * N + n[:, None]
    finish(there, present[None, :], sums, up_sums, dtype, GATED, ADD)


@triton.jit
def power_of_two_unit(largest):
    """Return a power of two, and its inverse, of which `largest` is 448 at most.

    448 is the largest number of float8 (e4m3).
    """
    bits = (tl.maximum(largest, 1e-30) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000  # the exponent rounded up, and no fraction
    inverse = 0x7F000000 - bits
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def split_kernel(
    x_ptr,  # [rows, K]; if SILU [rows, 2 * K], gates first
    norm_ptr,  # [K], read if NORM
    hi_lo_ptr,  # [PLANES, rows, K]: high, low, of int8; or one plane of float8 or float16
    unit_ptr,  # float32 [rows]
    K,
    eps,  # of the norm
    NORM: tl.constexpr,  # x is x over its root mean square, times norm
    SILU: tl.constexpr,  # x is silu(gate) * up
    PLANES: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least K
    PDL: tl.constexpr,
):
    """Convert x for tensor cores, to planes of 8 bits, or to float16 over a power of two.

    float16 is stored in the order in which `hopper.cu` multiplies it with float8. There a thread
    reads 32 adjacent columns of a weight, and the tensor core wants of each 16 columns two pairs.
    """
    row, rows = tl.program_id(0), tl.num_programs(0)
    dtype: tl.constexpr = hi_lo_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    if NORM:
        norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_ptr += row.to(tl.int64) * (2 * K if SILU else K)
    x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(x_ptr + K + k, mask=inside, other=0.0).to(tl.float32)
        x = silu_mul(x, up, x_ptr.dtype.element_ty).to(x_ptr.dtype.element_ty).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
        x = normed(x, scale, norm, x_ptr.dtype.element_ty)
    largest = tl.max(tl.abs(x), axis=0)
    if dtype != tl.int8:
        unit, inverse = power_of_two_unit(largest)
        high = (x * inverse).to(dtype)
        low = high
    elif PLANES == 2:
        unit = unit_of(largest)
        high, low = split(x, unit)
    else:
        unit = tl.maximum(largest, 1e-30) * (1.0 / 127.0)
        # As in `split`, the last bits are the nearest integer.
        high = (x * (1.0 / unit) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        low = high
    place = k
    if dtype == tl.float16:  # k is 128 a + 32 b + 4 c + 2 d + e
        place = k // 128 * 128 + k % 32 // 4 * 16 + k % 4 // 2 * 8 + k % 128 // 32 * 2 + k % 2
    here = hi_lo_ptr + row * K + place
    tl.store(here, high, mask=inside)
    if PLANES == 2:
        tl.store(here + rows * K, low, mask=inside)
    tl.store(unit_ptr + row, unit)


@triton.jit
def dequantise_kernel(
    numbers_ptr,  # int8 or float8 [rows, K]
    scale_ptr,  # float32 [rows / SCALE_ROWS, scale_columns], rounded up
    out_ptr,  # [rows, K]
    K,
    scale_columns,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,  # of a block with one scale
    BLOCK_K: tl.constexpr,
):
    """Multiply 8-bit numbers with the scales of their blocks."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < K
    numbers = tl.load(numbers_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    at = row // SCALE_ROWS * scale_columns + k // SCALE_COLUMNS
    weight = numbers * tl.load(scale_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + row * K + k, weight.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(
    sums_ptr,  # int32 [PLANES, rows, N]
    unit_ptr,  # float32 [rows]
    scale_ptr,  # float32 [N]
    out_ptr,  # [rows, N]
    N,
    PLANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Multiply sums of int8 products with the scales of their row and column."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    sums = tl.load(sums_ptr + row * N + n, mask=inside, other=0).to(tl.float32)
    if PLANES == 2:
        low = sums_ptr + (tl.num_programs(0) + row) * N + n
        sums = 256.0 * sums + tl.load(low, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scale_ptr + n, mask=inside, other=0.0) * tl.load(unit_ptr + row)
    tl.store(out_ptr + row * N + n, (sums * scale).to(out_ptr.dtype.element_ty), mask=inside)
