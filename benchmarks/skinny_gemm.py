"""A product with few rows in Triton, to see whether cuBLAS can be beaten: weights read once.

Each program streams a strip of output columns' weights; the few rows of x stay in the L2 cache.
"""

import triton
import triton.language as tl


@triton.jit
def skinny_gemm_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]
    out_ptr,  # [rows, N]
    rows,
    N,
    K,
    ADD: tl.constexpr,  # to what is in out
    BLOCK_ROWS: tl.constexpr,  # at least rows
    BLOCK_N: tl.constexpr,  # divides N
    BLOCK_K: tl.constexpr,  # divides K
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_K)
    weights = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    inputs = x_ptr + row[None, :] * K + k[:, None]
    present = (row < rows)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # Every weight is used once: it need not stay in the cache.
        weight = tl.load(weights + start, eviction_policy="evict_first")
        x = tl.load(inputs + start, mask=present, other=0.0)
        sums = tl.dot(weight, x, sums)
    here = out_ptr + row[None, :] * N + n[:, None]
    if ADD:
        sums += tl.load(here, mask=present, other=0.0).to(tl.float32)
    tl.store(here, sums.to(out_ptr.dtype.element_ty), mask=present)
