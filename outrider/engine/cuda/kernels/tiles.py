"""Products of more rows on tensor cores, which take sixteen rows in the time of one.

There x is large enough for its way from the cache to count, so programs take many rows of the
weight and may share the inner dimension. Of their left operand tensor cores take 64 rows at once,
which beyond sixteen rows of x are better the weight's.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.cuda.kernels.prefetch import prefetch
from outrider.engine.cuda.kernels.products import finish


@triton.jit
def end_tile(
    here,  # in the output
    present,  # which of it exist
    sums,  # of this program
    up_sums,
    partial_ptr,  # float32 [tiles, splits, 2 if GATED, numbers of a tile], written if splits > 1
    arrived_ptr,  # int32 [tiles], zeros before and after
    at,  # in a tile's numbers
    splits,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    squares=0.0,  # [1, ROWS], read if NORM: of x in this program's share, over K
    eps=0.0,
    NORM: tl.constexpr = False,  # sums are yet to be divided by x's root mean square
):
    """The last of a tile's programs to end adds up what all have left, and stores it."""
    dtype: tl.constexpr = here.dtype.element_ty
    if splits > 1:
        tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
        kinds: tl.constexpr = 2 if GATED else 1
        size: tl.constexpr = sums.numel
        left = partial_ptr + tile * (splits * kinds * size) + at
        tl.store(left + split * kinds * size, sums)
        if GATED:
            tl.store(left + (split * kinds + 1) * size, up_sums)
        if NORM:  # behind the sums of all tiles
            rows: tl.constexpr = squares.shape[1]
            behind = partial_ptr + tl.num_programs(0) * kinds * size
            left_squares = behind + tile * splits * rows + tl.arange(0, rows)[None, :]
            tl.store(left_squares + split * rows, squares)
        tl.debug_barrier()  # all threads have written before one says so
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") < splits - 1:
            return
        tl.store(arrived_ptr + tile, 0)
        sums = tl.zeros_like(sums)
        up_sums = tl.zeros_like(up_sums)
        if NORM:
            squares = tl.zeros_like(squares)
        for some in range(0, splits, 4):  # always in this order; four are on their way at a time
            for one in tl.static_range(4):
                i = some + one
                there = i < splits
                sums += tl.load(left + i * kinds * size, there, 0.0, cache_modifier=".cg")
                if GATED:
                    up_left = left + (i * kinds + 1) * size
                    up_sums += tl.load(up_left, there, 0.0, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(left_squares + i * rows, there, 0.0, cache_modifier=".cg")
    if NORM:
        inverse = tl.rsqrt(squares + eps)
        sums *= inverse
        up_sums *= inverse
    finish(here, present, sums, up_sums, dtype, GATED, ADD)


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
    WEIGHT_LEFT: tl.constexpr,  # of the two operands of tensor cores
    PDL: tl.constexpr,
):
    splits = K // share
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    n = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = split * share + tl.arange(0, BLOCK_K)
    weight_here = weight_ptr + n[:, None] * K + k[None, :]
    up_here = weight_here + N.to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        line = split * share + 64 * tl.arange(0, BLOCK_K // 64)
        early = weight_ptr + n[:, None] * K + line[None, :]
        prefetch(early, 64)
        if GATED:
            prefetch(early + N.to(tl.int64) * K, 64)
        gdc_wait()

    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    x_here = x_ptr + row[:, None] * K + k[None, :]
    if WEIGHT_LEFT:
        sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
        up_sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
        up_sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(0, share, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_here + start, mask=(row < rows)[:, None], other=0.0)
        weight = tl.load(weight_here + start, eviction_policy="evict_first")
        if GATED:
            up_weight = tl.load(up_here + start, eviction_policy="evict_first")
        if WEIGHT_LEFT:
            sums = tl.dot(weight, tl.trans(x), sums)
            if GATED:
                up_sums = tl.dot(up_weight, tl.trans(x), up_sums)
        else:
            sums = tl.dot(x, tl.trans(weight), sums)
            if GATED:
                up_sums = tl.dot(x, tl.trans(up_weight), up_sums)
    if WEIGHT_LEFT:
        row, column, n = row[None, :], column[:, None], n[:, None]
        at = column * ROWS + row
    else:
        row, column, n = row[:, None], column[None, :], n[None, :]
        at = row * BLOCK_N + column
    end_tile(
        out_ptr + row * N + n,
        row < rows,
        sums,
        up_sums,
        partial_ptr,
        arrived_ptr,
        at,
        splits,
        GATED,
        ADD,
    )
