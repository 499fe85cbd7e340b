"""Products of int8 weights and few rows on tensor cores that multiply int8.

Both operands come from shared memory as they are: to make bfloat16 of every weight takes longer
than to read it. So x becomes two int8, 256 * high + low: finer than bfloat16 but
where numbers are far below the largest of their row.

Where rows are many that is done once for all programs, and sums are exact. Of few rows it takes
less than a launch: each program does it for itself, block by block, as weights arrive.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.cuda.kernels.prefetch import prefetch
from outrider.engine.cuda.kernels.products import fixed_point, normed, split, unit_of
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
    tl.store(here, high, mask=inside)
    tl.store(here + rows * K, low, mask=inside)
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
    sums = (256.0 * high_sums.to(tl.float32) + low_sums.to(tl.float32)) * unit
    sums *= tl.load(scale_ptr + n)[:, None]
    up_sums = (256.0 * up_high_sums.to(tl.float32) + up_low_sums.to(tl.float32)) * unit
    if GATED:
        up_sums *= tl.load(scale_ptr + N + n)[:, None]
    end_tile(
        out_ptr + row[None, :] * N + n[:, None],
        present[None, :],
        sums,
        up_sums,
        partial_ptr,
        arrived_ptr,
        tl.arange(0, BLOCK_N)[:, None] * ROWS + row[None, :],
        splits,
        GATED,
        ADD,
    )


@triton.jit
def _planes(x, unit, ASM: tl.constexpr):
    """As `split`, but packed in as few instructions as there are."""
    if not ASM:
        return split(x, unit)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 first, last;
        prmt.b32 first, $2, $3, 0x51;
        prmt.b32 last, $4, $5, 0x51;
        prmt.b32 $0, first, last, 0x5410;
        prmt.b32 first, $2, $3, 0x40;
        prmt.b32 last, $4, $5, 0x40;
        prmt.b32 first, first, last, 0x5410;
        xor.b32 $1, first, 0x80808080;
        }""",
        "=&r,=r,r,r,r,r",
        [fixed_point(x, unit)],
        dtype=(tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )


@triton.jit(do_not_specialize=["rows"])
def block_plane_kernel(
    x_ptr,  # [rows, K]
    norm_ptr,  # [K], read if NORM
    eps,  # of the norm
    weight_ptr,  # this and all up to STAGES as of `plane_tile_kernel`
    scale_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    N,
    K,
    share,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,  # at least rows, a multiple of 8
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,  # x is x over its root mean square, times norm
    ASM: tl.constexpr,  # on a device, not interpreted
    PDL: tl.constexpr,
):
    """Make two int8 of every block of x itself, by the largest of the row's numbers there."""
    splits = K // share
    tile = tl.arange(0, 2 * BLOCK_N if GATED else BLOCK_N)  # if GATED, gates and what they open
    n = tl.program_id(0) // splits * BLOCK_N + tile % BLOCK_N + tile // BLOCK_N * N
    first = tl.program_id(0) % splits * share
    k = first + tl.arange(0, BLOCK_K)
    weight_here = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    if PDL:
        gdc_launch_dependents()
        line = first + 128 * tl.arange(0, BLOCK_K // 128)
        prefetch(weight_ptr + n.to(tl.int64)[:, None] * K + line[None, :], 128)
        if NORM:
            prefetch(norm_ptr + first + 64 * tl.arange(0, BLOCK_K // 64), 64)
        prefetch(scale_ptr + n, 1)
        gdc_wait()

    row = tl.arange(0, ROWS)
    present = row < rows
    x_here = x_ptr + row[:, None] * K + k[None, :]
    sums = tl.zeros([tile.shape[0], ROWS], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    for start in tl.range(0, share, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_here + start, mask=present[:, None], other=0.0).to(tl.float32)
        weight = tl.load(weight_here + start, eviction_policy="evict_first")
        if NORM:
            squares += tl.sum(tl.reshape(x * x, [ROWS, BLOCK_K // 8, 8]), axis=2)
            x *= tl.load(norm_ptr + k + start).to(tl.float32)[None, :]
        largest = tl.max(tl.reshape(tl.abs(x), [ROWS, BLOCK_K // 8, 8]), axis=2)
        largest = tl.max(largest.to(tl.int32, bitcast=True), axis=1)  # one instruction, of integers
        unit = unit_of(largest.to(tl.float32, bitcast=True))
        high, low = _planes(x, unit[:, None], ASM)
        planes = tl.trans(tl.join(high, low), 2, 0, 1)
        planes = tl.trans(tl.reshape(planes, [2 * ROWS, BLOCK_K]))
        both = tl.dot(weight, planes, out_dtype=tl.int32)
        both = tl.reshape(both, [tile.shape[0], 2, ROWS])
        high_sums, low_sums = tl.split(tl.trans(both, 0, 2, 1))
        sums += (256 * high_sums + low_sums).to(tl.float32) * unit[None, :]
    sums *= tl.load(scale_ptr + n)[:, None]
    up_sums = sums
    if GATED:
        sums, up_sums = tl.split(tl.trans(tl.reshape(sums, [2, BLOCK_N, ROWS]), 1, 2, 0))
    n = (tl.program_id(0) // splits * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    end_tile(
        out_ptr + row[None, :] * N + n[:, None],
        present[None, :],
        sums,
        up_sums,
        partial_ptr,
        arrived_ptr,
        tl.arange(0, BLOCK_N)[:, None] * ROWS + row[None, :],
        splits,
        GATED,
        ADD,
        (tl.sum(squares, axis=1) / K)[None, :],
        eps,
        NORM,
    )
