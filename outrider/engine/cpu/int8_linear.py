"""The kernel of products with int8 weights; `scalars` explains its form."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from enum import IntEnum

import numpy as np

from outrider.engine.cpu.scalars import (
    array,
    bits,
    element_of,
    exp,
    loop,
    narrow,
    take,
    values_of,
    widen,
)
from outrider.engine.cpu.vectors import LANES, dot4, load, prefetch, splat, store

BLOCK = 2 * LANES  # outputs at a time
_TILE = 8  # rows at a time
_AHEAD = 4096  # words of the weight that are prefetched ahead of their use


class Input(IntEnum):
    """Names what is multiplied: x, its weighted RMS norm, or silu of one half times the other."""

    PLAIN = 0
    NORMED = 1
    GATED = 2


_NORMED, _GATED = int(Input.NORMED), int(Input.GATED)


def int8_linear(arguments):
    """Multiply all rows with a block of outputs per item.

    Sums with the weights' 128 may overflow; without it they are right up to a width of 133,000.

    Arguments: x, norm, weight, scales, bias, out, rows, in, out's width, kind of input, whether
    to add to out, eps. The weight is int8 plus 128, [out / BLOCK, in / 4, BLOCK, 4].
    """
    args, element = values_of(arguments), element_of(arguments)
    rows, width, num_out, kind, add = args[8], args[9], args[10], args[11], args[12]
    eps = np.float32(bits(args[13]))
    x_width = 2 * width if kind == _GATED else width
    x = array(args[2], rows * x_width, element)
    norm = array(args[3], width, element)
    words = width // 4
    weight = array(args[4], args[1] * words * BLOCK, np.int32)
    scales = array(args[5], args[1] * BLOCK, np.float32)
    bias, has_bias = array(args[6], num_out, element), args[6] != 0
    out = array(args[7], rows * num_out, element)

    tiles = -(-rows // _TILE)
    rounded = np.zeros(tiles * _TILE * words, np.int32)
    row_scales = np.empty(rows, np.float32)
    offsets = np.empty(rows, np.int32)
    exact = np.empty(width, np.float32)
    for row in range(rows):
        _widen_row(x[row * x_width : (row + 1) * x_width], norm, kind, eps, exact)
        to = rounded[row * words : (row + 1) * words].view(np.int8)
        row_scales[row], offsets[row] = _round_row(exact, to)

    sums = np.empty(_TILE * BLOCK, np.int32)
    item = take(arguments)
    while item < args[1]:
        first = item * BLOCK
        count = min(BLOCK, num_out - first)
        block = weight[first * words : (first + BLOCK) * words]
        of_block = scales[first : first + BLOCK]
        for tile in range(tiles):
            start = tile * _TILE
            _multiply(rounded[start * words : (start + _TILE) * words], block, sums)
            for i in range(min(_TILE, rows - start)):
                row = start + i
                to = out[row * num_out + first : row * num_out + first + count]
                of_row = sums[i * BLOCK : (i + 1) * BLOCK]
                scale, offset = row_scales[row], offsets[row]
                for j in range(count):
                    y = np.float32(np.int32(of_row[j] - offset)) * (scale * of_block[j])
                    if has_bias:
                        y += widen(bias[first + j])
                    to[j] = narrow(y + widen(to[j]) if add else y, element)
        item = take(arguments)


@loop
def row_product(exact, weight, scales, out):
    """Multiply one row [in] in float32 to `out` [out]; weight and scales as of `int8_linear`."""
    words = len(exact) // 4
    rounded = np.empty(words, np.int32)
    row_scale, offset = _round_row(exact, rounded.view(np.int8))
    sums = np.empty(BLOCK, np.int32)
    for first in range(0, len(out), BLOCK):
        block = weight[first * words : (first + BLOCK) * words]
        a = b = splat(np.int32(0))
        for k in range(words):
            x = splat(rounded[k])
            a = dot4(a, load(block, k * BLOCK), x)
            b = dot4(b, load(block, k * BLOCK + LANES), x)
        store(sums, 0, a)
        store(sums, LANES, b)
        to, of_block = out[first : first + BLOCK], scales[first : first + BLOCK]
        for j in range(len(to)):
            to[j] = np.float32(np.int32(sums[j] - offset)) * (row_scale * of_block[j])


@loop
def _widen_row(x, norm, kind, eps, exact):
    """Write what is to be multiplied to `exact` [in]."""
    width = len(exact)
    if kind == _GATED:
        gate, up = x[:width], x[width : 2 * width]
        for i in range(width):
            z = widen(gate[i])
            exact[i] = z / (np.float32(1) + exp(-z)) * widen(up[i])
        return
    for i in range(width):
        exact[i] = widen(x[i])
    if kind == _NORMED:
        total = np.float32(0)
        for i in range(width):
            total += exact[i] * exact[i]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            exact[i] *= scale * widen(norm[i])


@loop
def _round_row(exact, rounded):
    """Round a row to int8; return its scale, and what the weights' 128 add to its products."""
    largest = np.uint32(0)  # as bits, of which the order is that of numbers
    for i in range(len(exact)):
        largest = np.uint32(max(largest, np.uint32(bits(exact[i]) & np.uint32(0x7FFFFFFF))))
    scale = max(bits(np.uint32(largest)), np.float32(1e-30)) / np.float32(127)
    inverse = np.float32(1) / scale
    for i in range(len(exact)):
        shifted = exact[i] * inverse + np.float32(12582912.0)  # 1.5 * 2**23: rounds
        rounded[i] = np.int8(bits(shifted))
    total = np.int32(0)
    for i in range(len(exact)):
        total += np.int32(rounded[i])
    return scale, np.int32(128) * total


@loop
def _multiply(rounded, weight, sums):
    """Set sums [_TILE, BLOCK] to the products of a tile of rows with a block of outputs."""
    words = len(rounded) // _TILE
    x0, x1 = rounded[:words], rounded[words : 2 * words]
    x2, x3 = rounded[2 * words : 3 * words], rounded[3 * words : 4 * words]
    x4, x5 = rounded[4 * words : 5 * words], rounded[5 * words : 6 * words]
    x6, x7 = rounded[6 * words : 7 * words], rounded[7 * words :]
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = splat(np.int32(0))
    b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = a0
    for k in range(words):
        v, w = load(weight, k * BLOCK), load(weight, k * BLOCK + LANES)
        prefetch(weight, k * BLOCK + _AHEAD)
        prefetch(weight, k * BLOCK + _AHEAD + LANES)
        x = splat(x0[k])
        a0, b0 = dot4(a0, v, x), dot4(b0, w, x)
        x = splat(x1[k])
        a1, b1 = dot4(a1, v, x), dot4(b1, w, x)
        x = splat(x2[k])
        a2, b2 = dot4(a2, v, x), dot4(b2, w, x)
        x = splat(x3[k])
        a3, b3 = dot4(a3, v, x), dot4(b3, w, x)
        x = splat(x4[k])
        a4, b4 = dot4(a4, v, x), dot4(b4, w, x)
        x = splat(x5[k])
        a5, b5 = dot4(a5, v, x), dot4(b5, w, x)
        x = splat(x6[k])
        a6, b6 = dot4(a6, v, x), dot4(b6, w, x)
        x = splat(x7[k])
        a7, b7 = dot4(a7, v, x), dot4(b7, w, x)
    for row, (a, b) in enumerate(
        ((a0, b0), (a1, b1), (a2, b2), (a3, b3), (a4, b4), (a5, b5), (a6, b6), (a7, b7))
    ):
        store(sums, row * BLOCK, a)
        store(sums, row * BLOCK + LANES, b)
