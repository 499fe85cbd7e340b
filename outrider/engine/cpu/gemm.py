"""The kernel of products with bfloat16 weights; `scalars` explains its form.

Without AMX a core multiplies float32 faster than bfloat16, but reading bfloat16 takes half the
time. So weights are read as bfloat16 and widened in registers, once for all rows of a tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
# ruff: noqa: ARG001

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.engine.cpu.scalars import (
    array,
    element_of,
    loop,
    narrow,
    take,
    values_of,
    wide_of,
    widen,
)
from outrider.engine.cpu.vectors import LANES, prefetch_line

COLUMNS = 2 * LANES  # of the output, side by side in an item
_MOST_ROWS = 12  # 24 sums, of 32 registers
_AHEAD = 256  # steps of 64 bytes to prefetch


def linear(arguments):
    """Compute COLUMNS outputs of all rows per item.

    Arguments: x, weights, bias, residual, out, in_features, rows; bias and residual may be 0.
    x [rows, in_features] and out [rows, out_features] are bfloat16; `pack` makes the weights.
    """
    args, element, wide = values_of(arguments), element_of(arguments), wide_of(arguments)
    blocks, inputs, rows = args[1], args[7], args[8]
    outputs = blocks * COLUMNS
    x = array(args[2], rows * inputs, element)
    weights = array(args[3], blocks * inputs * LANES, np.uint32)
    bias = array(args[4], outputs, element)
    residual = array(args[5], rows * outputs, element)
    out = array(args[6], rows * outputs, element)
    tiled = np.empty(-(-rows // _MOST_ROWS) * _MOST_ROWS * inputs, wide)
    sums = np.empty(_MOST_ROWS * COLUMNS, wide)
    _tile(x, tiled, rows, inputs)
    block = take(arguments)
    while block < blocks:
        for first in range(0, rows, _MOST_ROWS):
            count = min(_MOST_ROWS, rows - first)
            _multiply(count, weights, block * inputs * LANES, tiled, first * inputs, inputs, sums)
            for i in range(count):
                at = (first + i) * outputs + block * COLUMNS
                for j in range(COLUMNS):
                    total = sums[i * COLUMNS + j]
                    if args[4] != 0:
                        total += widen(bias[block * COLUMNS + j])
                    if args[5] != 0:
                        total += widen(residual[at + j])
                    out[at + j] = narrow(total, element)
        block = take(arguments)


@loop
def _padded(rows):
    """Return the size of a tile of `rows` rows."""
    return rows if rows <= 6 else -(-rows // 2) * 2


@loop
def _tile(x, tiled, rows, inputs):
    """Widen x to [tiles, inputs, rows of the tile]."""
    for first in range(0, rows, _MOST_ROWS):
        count = min(_MOST_ROWS, rows - first)
        size = _padded(count)
        for i in range(size):
            for k in range(inputs):
                at = first * inputs + k * size + i
                tiled[at] = widen(x[(first + i) * inputs + k]) if i < count else 0


@loop
def _multiply(count, weights, weight, x, at, inputs, sums):
    """Set sums [rows, COLUMNS] to the products of a tile of x with a block of columns."""
    size = _padded(count)
    if size == 1:
        _tile_product(weights, weight, x, at, inputs, sums, 1)
    elif size == 2:
        _tile_product(weights, weight, x, at, inputs, sums, 2)
    elif size == 3:
        _tile_product(weights, weight, x, at, inputs, sums, 3)
    elif size == 4:
        _tile_product(weights, weight, x, at, inputs, sums, 4)
    elif size == 5:
        _tile_product(weights, weight, x, at, inputs, sums, 5)
    elif size == 6:
        _tile_product(weights, weight, x, at, inputs, sums, 6)
    elif size == 8:
        _tile_product(weights, weight, x, at, inputs, sums, 8)
    elif size == 10:
        _tile_product(weights, weight, x, at, inputs, sums, 10)
    else:
        _tile_product(weights, weight, x, at, inputs, sums, 12)


@intrinsic(prefer_literal=True)
def _tile_product(_context, weights, weight, x, at, inputs, sums, rows):
    """Compute a tile with a literal number of rows, whose sums stay in registers."""
    signature = types.none(weights, types.intp, x, types.intp, types.intp, sums, rows)
    size = rows.literal_value

    def generate(context, builder, _, args):
        number = ir.FloatType()
        floats, words = ir.VectorType(number, LANES), ir.VectorType(ir.IntType(32), LANES)
        low = ir.Constant(words, [16] * LANES)
        high = ir.Constant(words, [0xFFFF0000] * LANES)
        lanes = ir.Constant(words, [0] * LANES)
        nothing = ir.Constant(floats, ir.Undefined)

        def address(array_type, value, offset):
            data = context.make_array(array_type)(context, builder, value).data
            return builder.gep(data, [offset])

        weights_at, x_at = address(weights, args[0], args[1]), address(x, args[2], args[3])
        totals = [
            [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * LANES)) for _ in "ab"]
            for _ in range(size)
        ]
        with cgutils.for_range(builder, args[4]) as k_loop:
            k = k_loop.index
            place = builder.gep(weights_at, [builder.mul(k, k.type(LANES))])
            word = builder.load(builder.bitcast(place, words.as_pointer()))
            word.align = 4
            prefetch_line(builder, builder.gep(place, [k.type(_AHEAD * LANES)]))
            pair = [
                builder.bitcast(builder.shl(word, low), floats),
                builder.bitcast(builder.and_(word, high), floats),
            ]
            first = builder.mul(k, k.type(size))
            for i in range(size):
                one = builder.load(builder.gep(x_at, [builder.add(first, k.type(i))]))
                one = builder.insert_element(nothing, one, ir.IntType(32)(0))
                one = builder.shuffle_vector(one, nothing, lanes)
                for total, columns in zip(totals[i], pair, strict=True):
                    product = builder.fmul(one, columns, flags=["contract"])
                    sum_ = builder.fadd(builder.load(total), product, flags=["contract"])
                    builder.store(sum_, total)
        for i in range(size):
            for half, total in enumerate(totals[i]):
                offset = args[3].type(i * COLUMNS + half * LANES)
                to = builder.bitcast(address(sums, args[5], offset), floats.as_pointer())
                builder.store(builder.load(total), to).align = 4
        return context.get_dummy_value()

    return signature, generate
