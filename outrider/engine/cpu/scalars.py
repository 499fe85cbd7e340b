"""The parts of every compiled kernel: its arguments, its element types, and `exp`.

A kernel is a C function of one pointer, which OpenMP threads can run (see `team`). The pointer
leads to int64 arguments. The first counts the items taken so far, the second is their number, and
tensors are addresses. Threads take items until none is left.

Elements are float32, float64, or uint16 for bfloat16, which is the upper half of a float32. Sums
have the "wide" type: float32 for bfloat16, else the element's own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, import-untyped"
# ruff: noqa: ARG001, ARG005, E501

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model
from numba.np.numpy_support import as_dtype

# Vectorising needs sums in any order. NaN and infinity keep their meaning.
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    "error_model": "numpy",
}
# Parts become code of the kernel itself. Where a kernel calls a part, the process that compiles it
# runs another copy of the part than processes that load it, and the copies round differently.
loop = njit(forceinline=True, **OPTIONS)
_as_written = njit(forceinline=True, fastmath={"contract"}, error_model="numpy")

# Numba's cache compares only the file of the kernel itself. With this number in its type a kernel
# is compiled again after any change in this folder.
_VERSION = zlib.crc32(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py"))))


class Arguments(types.Type):
    """The type of a kernel's pointer, which names the tensors' element type, too."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(f"Arguments({element}, {_VERSION})")


@register_model(Arguments)
class _ArgumentsModel(models.PrimitiveModel):
    def __init__(self, manager, arguments):
        super().__init__(manager, arguments, ir.IntType(64).as_pointer())


@intrinsic
def values_of(_context, arguments):
    """Return the arguments as a pointer that can be indexed."""
    return types.CPointer(types.int64)(arguments), lambda _, __, ___, args: args[0]


@intrinsic
def take(_context, arguments):
    """Return the number of the next item, for this thread alone."""

    def generate(_, builder, __, args):
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", args[0], one, "monotonic")

    return types.int64(arguments), generate


def element_of(arguments: Any) -> Any:
    """Return the type of the tensors' elements."""
    raise NotImplementedError


@overload(element_of)
def _element_of(arguments):
    element = as_dtype(arguments.element).type
    return lambda arguments: element


def wide_of(arguments: Any) -> Any:
    """Return the type of sums."""
    raise NotImplementedError


@overload(wide_of)
def _wide_of(arguments):
    bfloat16 = arguments.element == types.uint16
    wide = np.float32 if bfloat16 else as_dtype(arguments.element).type
    return lambda arguments: wide


@intrinsic
def _pointer(_context, address):
    def generate(_, builder, __, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@loop
def array(address, size, dtype):
    """View the memory at an address."""
    return carray(_pointer(address), (size,), dtype)


@intrinsic
def bits(_context, x):
    """Reinterpret float32 as uint32, uint32 as float32, or int64 as float64."""
    target = {types.float32: types.uint32, types.uint32: types.float32, types.int64: types.float64}

    def generate(context, builder, _, args):
        return builder.bitcast(args[0], context.get_value_type(target[x]))

    return target[x](x), generate


def widen(x: Any) -> Any:
    """Convert an element to the type of sums."""
    raise NotImplementedError


@overload(widen)
def _widen(x):
    if x == types.uint16:
        return lambda x: bits(np.uint32(np.uint32(x) << np.uint32(16)))
    return lambda x: x


def narrow(x: Any, element: Any) -> Any:
    """Round a number to the nearest element, ties to even."""
    raise NotImplementedError


@overload(narrow)
def _narrow(x, element):
    if element.dtype != types.uint16:
        return lambda x, element: x

    def round_to_even(x, element):
        word = bits(x)
        word = np.uint32(word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))
        return np.uint16(word >> np.uint32(16)) if x == x else np.uint16(0x7FC0)

    return round_to_even


def exp(x: Any) -> Any:
    """Exponentiate; in float32 within 1.4 units in the last place, vectorised."""
    raise NotImplementedError


@overload(exp)
def _exp(x):
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


@_as_written
def _exp32(x):
    """Compute Cephes' expf: exp(x) = 2**n * exp(r), |r| <= log(2) / 2, exp(r) by a polynomial."""
    x = min(max(x, np.float32(-87.0)), np.float32(89.0))  # exp(89) becomes infinite
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)  # 1.5 * 2**23: rounds
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    return p * bits(np.uint32((bits(shifted) << np.uint32(23)) + np.uint32(0x3F800000)))
