"""The tilings that the autotuner tries."""

from dataclasses import replace

from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.tilings import Gemv, HopperTiles, Tiling

# More than 100 programs in clusters of three or four do not all find room at once.
_HOPPER = (HopperTiles(128, 100), HopperTiles(256, 100), HopperTiles(128, 264, 2))
_HOPPER_INT8 = tuple(replace(tiling, int8=True) for tiling in (*_HOPPER, HopperTiles(128, 66)))
_MOST_INT8_ROWS = 96

# By the largest number of rows of x.
CANDIDATES: dict[int, tuple[Tiling, ...]] = {
    1: (Gemv(64, 8), Gemv(128, 4)),
    2: (Gemv(128, 4), *_HOPPER),
    **dict.fromkeys((8, 16, 32, 40, 64, _MOST_INT8_ROWS, 160), _HOPPER),
}
_INT8_CANDIDATES: dict[int, tuple[Tiling, ...]] = {
    1: (Gemv(256, 4, int8=True), Gemv(512, 4, int8=True), Gemv(64, 8, int8=True)),
    2: (Gemv(128, 4, int8=True), *_HOPPER_INT8),
}


def candidates(rows: int, *, int8: bool) -> tuple[Tiling, ...]:
    """Return the tilings to try for up to so many rows, a key of `CANDIDATES`.

    The first ones read the fewest bytes. On Hopper a weight that is also there as int8 is tried as
    bfloat16 only at one row, or where int8 is not tried.
    """
    tilings: tuple[Tiling, ...] = ()
    if int8 and rows <= _MOST_INT8_ROWS:
        tilings = _INT8_CANDIDATES.get(rows, _HOPPER_INT8)
    if rows == 1 or not (tilings and hopper.available()):
        tilings += CANDIDATES[rows]
    return tuple(t for t in tilings if hopper.available() or not isinstance(t, HopperTiles))
