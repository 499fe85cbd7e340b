"""The operations between the products of a Llama layer, in float32, rounded where torch rounds.

Every program handles one token or a few heads of it. A decoding step is bound by latency.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [tokens, hidden]
    weight_ptr,  # [hidden]
    out_ptr,  # [tokens, hidden]
    x_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,  # at least hidden
    PDL: tl.constexpr,
):
    """Norm one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, normed * weight, mask=inside)


@triton.jit
def qk_norm_kernel(
    qkv_ptr,  # [tokens, >= heads * dim]; its first `heads` heads are normed in place
    weight_ptr,  # [heads, dim]
    qkv_stride,
    heads,
    eps,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # at least DIM
    HEADS: tl.constexpr,  # heads per program
    PDL: tl.constexpr,
):
    """Norm some query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (head < heads) & (column < DIM)
    at = head * DIM + column
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    here = qkv_ptr + token * qkv_stride + at
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    normed = (x * scale[:, None]).to(qkv_ptr.dtype.element_ty).to(tl.float32)
    tl.store(here, normed * weight, mask=inside)


@triton.jit
def rotated(x, partner, cos, sin, dtype: tl.constexpr):
    """Rotate x, which lies half a head from its partner; float32."""
    product = x.to(tl.float32) * cos.to(tl.float32)
    return product.to(dtype).to(tl.float32) + partner.to(tl.float32) * sin.to(tl.float32)


@triton.jit
def scale_of(exponent):
    """Return the power of two with a float32's `exponent`."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(largest):
    """Return the exponent of a vector's scale, as `fp8.quantise` does, of its largest number."""
    bits = largest.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)


@triton.jit
def rotate_and_store_kernel(
    qkv_ptr,  # [tokens, heads + 2 * kv_heads, 2, half]; queries are rotated in place
    rope_ptr,  # [tokens, 2, 2, half]: cosines of both halves, then -sin, sin
    slots_ptr,  # int64 [tokens]; negative slots are not stored
    keys_ptr,  # [slots, kv_heads, 2, half]
    values_ptr,  # [slots, kv_heads, 2, half]
    scales_ptr,  # bfloat16 [slots, kv_heads, 2]: of key and value, used if FLOAT8
    qkv_stride,
    heads,
    kv_heads,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # at least HALF
    HEADS: tl.constexpr,  # heads per program
    FLOAT8: tl.constexpr,  # keys and values are stored as `fp8.quantise` rounds them
    PDL: tl.constexpr,
):
    """Rotate some heads of one token, and store its keys and values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = column < HALF
    present = inside & (head < heads + 2 * kv_heads)
    dtype = qkv_ptr.dtype.element_ty

    here = qkv_ptr + token * qkv_stride + head * (2 * HALF) + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(here, mask=present, other=0.0)
    second = tl.load(here + HALF, mask=present, other=0.0)
    rope = rope_ptr + token * (4 * HALF) + column
    cos_first = tl.load(rope, mask=inside, other=0.0)
    cos_second = tl.load(rope + HALF, mask=inside, other=0.0)
    sin_first = tl.load(rope + 2 * HALF, mask=inside, other=0.0)
    sin_second = tl.load(rope + 3 * HALF, mask=inside, other=0.0)
    rotated_first = rotated(first, second, cos_first, sin_first, dtype)
    rotated_second = rotated(second, first, cos_second, sin_second, dtype)

    is_query = present & (head < heads)
    tl.store(here, rotated_first, mask=is_query)
    tl.store(here + HALF, rotated_second, mask=is_query)
    slot = tl.load(slots_ptr + token)
    stored = present & (slot >= 0)
    is_key = stored & (head >= heads) & (head < heads + kv_heads)
    is_value = stored & (head >= heads + kv_heads)
    if FLOAT8:
        is_rotated = head < heads + kv_heads
        first = tl.where(is_rotated, rotated_first.to(dtype), first).to(tl.float32)
        second = tl.where(is_rotated, rotated_second.to(dtype), second).to(tl.float32)
        largest = tl.maximum(tl.abs(first), tl.abs(second))
        exponent = exponent_of(tl.max(largest, axis=1, keep_dims=True))
        inverse = scale_of(254 - exponent)
        first = (first * inverse).to(keys_ptr.dtype.element_ty)
        second = (second * inverse).to(keys_ptr.dtype.element_ty)
        rotated_first, rotated_second = first, second
        of_value = (head >= heads + kv_heads).to(tl.int32)
        scale = scales_ptr + (slot * kv_heads + (head - heads - kv_heads * of_value)) * 2 + of_value
        has_scale = (slot >= 0) & (head >= heads) & (head < heads + 2 * kv_heads)
        tl.store(scale, scale_of(exponent).to(tl.bfloat16), mask=has_scale)
    key = keys_ptr + (slot * kv_heads + (head - heads)) * (2 * HALF) + column
    tl.store(key, rotated_first, mask=is_key)
    tl.store(key + HALF, rotated_second, mask=is_key)
    value = values_ptr + (slot * kv_heads + (head - heads - kv_heads)) * (2 * HALF) + column
    tl.store(value, first, mask=is_value)
    tl.store(value + HALF, second, mask=is_value)


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up in float32, the first factor rounded to `dtype`."""
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [tokens, 2 * intermediate]
    out_ptr,  # [tokens, intermediate]
    intermediate,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute silu(gate) * up for a block of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < intermediate
    here = gate_up_ptr + token * 2 * intermediate + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + intermediate, mask=inside, other=0.0).to(tl.float32)
    product = silu_mul(gate, up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * intermediate + column, product, mask=inside)
