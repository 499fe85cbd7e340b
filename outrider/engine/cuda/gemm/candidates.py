"""Which ways of dividing products of few rows are tried."""

from dataclasses import replace

from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.tilings import (
    Gemv,
    HopperTiles,
    Int8HiLo,
    Int8HiLoBlocks,
    Tiles,
    Tiling,
)

_FEW = (
    Tiles(64, 256, 3, 4, 256),
    Tiles(128, 128, 4, 4, 256),
    Tiles(64, 128, 4, 4, 256, weight_left=True),
)
_FEW_INT8 = (
    Int8HiLoBlocks(128, 256, 4, 4, 128),
    Int8HiLoBlocks(64, 256, 6, 4, 128),
    Int8HiLoBlocks(128, 256, 3, 4, 128),
)
# More than 100 programs in clusters of three or four do not all find room at once.
_BULK = (HopperTiles(128, 100), HopperTiles(256, 100), HopperTiles(128, 264, 2))
_BULK_INT8 = tuple(replace(way, int8=True) for way in (*_BULK, HopperTiles(128, 66)))
_MORE: tuple[Tiling, ...] = (Tiles(128, 128, 4, 4, 256, weight_left=True), *_BULK)
_MORE_INT8: tuple[Tiling, ...] = (
    Int8HiLo(128, 256, 3, 4, 128),
    Int8HiLo(128, 128, 5, 4, 128),
    *_BULK_INT8,
)

# What is tried for up to so many rows of x. Large products are at the bandwidth where each
# multiprocessor has one program with 100 KB and more of weights on their way.
CANDIDATES: dict[int, tuple[Tiling, ...]] = {
    1: (Gemv(64, 8), Gemv(128, 4)),
    2: (Gemv(128, 4), *_FEW),
    8: (*_FEW, *_BULK),
    16: (*_FEW, *_BULK),
    32: (Tiles(64, 128, 4, 4, 256, weight_left=True), *_MORE),
    40: _MORE,  # eight requests with four tokens to verify
    64: _MORE,
    96: _BULK,
    160: _BULK,
}

# Beside these where weights may be quantized: half the bytes.
INT8_CANDIDATES: dict[int, tuple[Tiling, ...]] = {
    1: (Gemv(256, 4, int8=True), Gemv(512, 4, int8=True), Gemv(64, 8, int8=True)),
    2: (Gemv(128, 4, int8=True), *_FEW_INT8),
    8: (*_FEW_INT8, *_BULK_INT8),
    16: (*_FEW_INT8, *_BULK_INT8),
    32: (
        Int8HiLo(128, 128, 5, 4, 128),
        Int8HiLo(128, 128, 4, 4, 256),
        Int8HiLo(64, 256, 4, 4, 128),
        *_BULK_INT8,
    ),
    40: _MORE_INT8,
    64: _MORE_INT8,
    96: _BULK_INT8,
    160: (),
}


def candidates(rows: int, *, int8: bool) -> tuple[Tiling, ...]:
    """The ways to choose among for up to so many rows, a key of `CANDIDATES`; those that read the
    least first. Where bulk tiles are to be had, planes by other kernels were never faster, and
    weights that are not quantized only at one row, or beyond what int8 is tried for.
    """
    bulk = hopper.available()
    ways = INT8_CANDIDATES[rows] if int8 else ()
    if rows == 1 or not (ways and bulk):
        ways += CANDIDATES[rows]
    unwanted = Int8HiLo if bulk else HopperTiles
    return tuple(way for way in ways if not isinstance(way, unwanted))
