"""The operations between the products of a Llama layer; `scalars` explains their form.

They round where `TorchOps` rounds.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np

from outrider.engine.cpu.scalars import (
    array,
    bits,
    element_of,
    exp,
    narrow,
    take,
    values_of,
    wide_of,
    widen,
)


def rms_norm(arguments):
    """Norm a token per item. Arguments: x, weight, out, hidden, eps."""
    args, element, wide = values_of(arguments), element_of(arguments), wide_of(arguments)
    tokens, hidden, eps = args[1], args[5], wide(bits(args[6]))
    x = array(args[2], tokens * hidden, element)
    weight = array(args[3], hidden, element)
    out = array(args[4], tokens * hidden, element)
    token = take(arguments)
    while token < tokens:
        row = x[token * hidden : (token + 1) * hidden]
        to = out[token * hidden : (token + 1) * hidden]
        total = wide(0)
        for i in range(hidden):
            total += widen(row[i]) * widen(row[i])
        scale = wide(1) / np.sqrt(total / wide(hidden) + eps)
        for i in range(hidden):
            to[i] = narrow(widen(row[i]) * scale * widen(weight[i]), element)
        token = take(arguments)


def qk_norm(arguments):
    """Norm the heads of a token per item.

    Arguments: qkv, weight, stride of a token, heads, dim, eps.
    """
    args, element, wide = values_of(arguments), element_of(arguments), wide_of(arguments)
    tokens, stride, heads, dim, eps = args[1], args[4], args[5], args[6], wide(bits(args[7]))
    qkv = array(args[2], tokens * stride, element)
    weight = array(args[3], heads * dim, element)
    token = take(arguments)
    while token < tokens:
        for head in range(heads):
            start = token * stride + head * dim
            x = qkv[start : start + dim]
            w = weight[head * dim : (head + 1) * dim]
            total = wide(0)
            for i in range(dim):
                total += widen(x[i]) * widen(x[i])
            scale = wide(1) / np.sqrt(total / wide(dim) + eps)
            for i in range(dim):
                normed = widen(narrow(widen(x[i]) * scale, element))
                x[i] = narrow(normed * widen(w[i]), element)
        token = take(arguments)


def rotate_and_store(arguments):
    """Rotate a token per item, and store its keys and values.

    Arguments: qkv, rope, slots, keys, values, heads, kv_heads, dim, number of slots.
    """
    args, element = values_of(arguments), element_of(arguments)
    tokens, heads, kv_heads, dim, num_slots = args[1], args[7], args[8], args[9], args[10]
    stride, half, pool_size = (heads + 2 * kv_heads) * dim, dim // 2, kv_heads * num_slots * dim
    qkv = array(args[2], tokens * stride, element)
    rope = array(args[3], tokens * 2 * dim, element)
    slots = array(args[4], tokens, np.int64)
    keys = array(args[5], pool_size, element)
    values = array(args[6], pool_size, element)
    token = take(arguments)
    while token < tokens:
        cos = rope[token * 2 * dim :][:dim]
        sin = rope[token * 2 * dim + dim :][:dim]
        for head in range(heads + kv_heads):
            start = token * stride + head * dim
            first, second = qkv[start : start + half], qkv[start + half : start + dim]
            for i in range(half):
                a, b = widen(first[i]), widen(second[i])
                rotated_a = widen(narrow(a * widen(cos[i]), element))
                rotated_b = widen(narrow(b * widen(cos[half + i]), element))
                first[i] = narrow(rotated_a + b * widen(sin[i]), element)
                second[i] = narrow(rotated_b + a * widen(sin[half + i]), element)
        for head in range(kv_heads):
            key = token * stride + (heads + head) * dim
            value = key + kv_heads * dim
            at = (head * num_slots + slots[token]) * dim
            for i in range(dim):
                keys[at + i] = qkv[key + i]
                values[at + i] = qkv[value + i]
        token = take(arguments)


def store_context(arguments):
    """Rotate a token's keys of all layers per item, and store keys and values.

    Arguments: keys_values, rope, slots, the pools' addresses int64 [layers, 2], layers, kv_heads,
    dim, number of slots.
    """
    args, element = values_of(arguments), element_of(arguments)
    tokens, layers, kv_heads, dim, num_slots = args[1], args[6], args[7], args[8], args[9]
    width, half, pool_size = layers * kv_heads * dim, dim // 2, kv_heads * num_slots * dim
    keys_values = array(args[2], tokens * 2 * width, element)
    rope = array(args[3], tokens * 2 * dim, element)
    slots = array(args[4], tokens, np.int64)
    pools = array(args[5], layers * 2, np.int64)
    token = take(arguments)
    while token < tokens:
        rows = rope[token * 2 * dim :][: 2 * dim]
        cos_a, cos_b, sin_a, sin_b = (
            rows[:half],
            rows[half:dim],
            rows[dim:][:half],
            rows[dim:][half:],
        )
        for layer in range(layers):
            keys = array(pools[2 * layer], pool_size, element)
            values = array(pools[2 * layer + 1], pool_size, element)
            for head in range(kv_heads):
                at = (head * num_slots + slots[token]) * dim
                to = keys[at : at + dim]
                start = token * 2 * width + (layer * kv_heads + head) * dim
                key = keys_values[start : start + dim]
                for i in range(half):
                    a, b = widen(key[i]), widen(key[half + i])
                    rotated_a = widen(narrow(a * widen(cos_a[i]), element))
                    rotated_b = widen(narrow(b * widen(cos_b[i]), element))
                    turned_a = widen(narrow(b * widen(sin_a[i]), element))
                    turned_b = widen(narrow(a * widen(sin_b[i]), element))
                    to[i] = narrow(rotated_a + turned_a, element)
                    to[half + i] = narrow(rotated_b + turned_b, element)
                values[at : at + dim] = keys_values[start + width : start + width + dim]
        token = take(arguments)


def silu_mul(arguments):
    """Compute silu(gate) * up of a token per item. Arguments: gate_up, out, width."""
    args, element, wide = values_of(arguments), element_of(arguments), wide_of(arguments)
    tokens, width = args[1], args[4]
    gate_up = array(args[2], tokens * 2 * width, element)
    out = array(args[3], tokens * width, element)
    token = take(arguments)
    while token < tokens:
        gate = gate_up[token * 2 * width :][:width]
        up = gate_up[token * 2 * width + width :][:width]
        to = out[token * width : (token + 1) * width]
        for i in range(width):
            x = widen(gate[i])
            silu = widen(narrow(x / (wide(1) + exp(-x)), element))
            to[i] = narrow(silu * widen(up[i]), element)
        token = take(arguments)
