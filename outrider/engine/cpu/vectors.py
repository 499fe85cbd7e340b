"""Vectors of 16 numbers inside Numba functions, which do not vectorise by themselves."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, import-untyped"
# ruff: noqa: ARG001, E501

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16


class Vector(types.Type):
    """16 numbers of one type, in registers."""

    def __init__(self, number):
        self.number = number
        super().__init__(name=f"Vector({number})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        number = manager.lookup(vector.number).get_value_type()
        super().__init__(manager, vector, ir.VectorType(number, LANES))


def _at(context, builder, array_type, array, index):
    """Return a pointer to a vector of elements, aligned as one element."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.gep(data, [index])
    element = context.get_data_type(array_type.dtype)
    return builder.bitcast(pointer, ir.VectorType(element, LANES).as_pointer())


def _alignment(context, array_type):
    return context.get_abi_sizeof(context.get_data_type(array_type.dtype))


@intrinsic
def load(_context, array, index):
    """Load array[index : index + 16], widened if it is bfloat16."""
    bfloat16 = array.dtype == types.uint16
    vector = Vector(types.float32 if bfloat16 else array.dtype)

    def generate(context, builder, _, args):
        loaded = builder.load(_at(context, builder, array, args[0], args[1]))
        loaded.align = _alignment(context, array)
        if not bfloat16:
            return loaded
        words = ir.VectorType(ir.IntType(32), LANES)
        bits = builder.shl(builder.zext(loaded, words), ir.Constant(words, [16] * LANES))
        return builder.bitcast(bits, context.get_value_type(vector))

    return vector(array, types.intp), generate


@intrinsic
def store(_context, array, index, vector):
    """Store a vector in array[index : index + 16]."""

    def generate(context, builder, _, args):
        stored = builder.store(args[2], _at(context, builder, array, args[0], args[1]))
        stored.align = _alignment(context, array)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), generate


@intrinsic
def prefetch(_context, array, index):
    """Prefetch the line of array[index] to all caches."""

    def generate(context, builder, _, args):
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        at = builder.bitcast(_at(context, builder, array, args[0], args[1]), byte)
        builder.call(function, [at, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp), generate


@intrinsic
def splat(_context, x):
    """Fill a vector with x."""
    vector = Vector(x)

    def generate(context, builder, _, args):
        empty = ir.Constant(context.get_value_type(vector), ir.Undefined)
        first = builder.insert_element(empty, args[0], ir.Constant(ir.IntType(32), 0))
        return _shuffle(builder, first, [0] * LANES)

    return vector(x), generate


def _shuffle(builder, vector, lanes, other=None):
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    other = ir.Constant(vector.type, ir.Undefined) if other is None else other
    return builder.shuffle_vector(vector, other, mask)


@intrinsic
def fma(_context, a, b, c):
    """Return a * b + c."""

    def generate(_, builder, __, args):
        x, y, z = args
        return builder.fadd(builder.fmul(x, y, flags=["contract"]), z, flags=["contract"])

    return a(a, b, c), generate


@intrinsic
def dot4(_context, sums, unsigned, signed):
    """Add the products of four bytes, unsigned times signed, to each lane of int32 `sums`.

    All are int32 vectors; it needs AVX-512 VNNI.
    """

    def generate(context, builder, _, args):
        words = context.get_value_type(sums)
        kind = ir.FunctionType(words, [words] * 3)
        name = "llvm.x86.avx512.vpdpbusd.512"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return sums(sums, unsigned, signed), generate


def _larger(builder, x, y):
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@intrinsic
def larger(_context, a, b):
    """Return the larger of each pair of lanes."""

    def generate(_, builder, __, args):
        return _larger(builder, *args)

    return a(a, b), generate


@intrinsic
def largest(_context, vector):
    """Return the largest lane."""

    def generate(_, builder, __, args):
        (x,) = args
        for half in (8, 4, 2, 1):
            low = _shuffle(builder, x, list(range(half)))
            x = _larger(builder, low, _shuffle(builder, x, list(range(half, 2 * half))))
        return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))

    return vector.number(vector), generate


def _meet(builder, x, y, width):
    """Add neighbouring blocks of `width` lanes, and interleave those of x and y."""
    from_x = [i // width % 2 == 0 for i in range(LANES)]
    first = [i if own else i - width + LANES for i, own in enumerate(from_x)]
    second = [i + width if own else i + LANES for i, own in enumerate(from_x)]
    return builder.fadd(_shuffle(builder, x, first, y), _shuffle(builder, x, second, y))


@intrinsic
def store_sums(_context, array, index, a, b, c, d):
    """Store the sums of a, b, c and d over their lanes in array[index : index + 4]."""

    def generate(context, builder, _, args):
        a, b, c, d = args[2:]
        sums = _meet(builder, _meet(builder, a, b, 1), _meet(builder, c, d, 1), 2)
        for half in (8, 4):
            low = _shuffle(builder, sums, list(range(half)))
            sums = builder.fadd(low, _shuffle(builder, sums, list(range(half, 2 * half))))
        pointer = builder.bitcast(
            _at(context, builder, array, args[0], args[1]), sums.type.as_pointer()
        )
        builder.store(sums, pointer).align = _alignment(context, array)
        return context.get_dummy_value()

    return types.none(array, types.intp, a, b, c, d), generate
