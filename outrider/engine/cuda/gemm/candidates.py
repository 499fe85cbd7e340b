"""The tilings that the autotuner tries."""

from dataclasses import replace

import torch

from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.hopper import Reads
from outrider.engine.cuda.gemm.tilings import Gemv, HopperTiles, Small, Tiling

# More than 100 programs in clusters of three or four do not all find room at once.
_HOPPER = (HopperTiles(128, 100), HopperTiles(256, 100), HopperTiles(128, 264, 2))
_MOST_FEW_ROWS = 96  # with inputs of 16 bits, in one part
_MOST_PARTS_ROWS = 256  # likewise in several
_MOST_ROUNDED_ROWS = 160
MANY_ROWS = {256: 256, 512: 512, 1 << 20: 2048}
"""Further numbers of rows for weights of 8 bits -> how many are timed."""

# By the largest number of rows of x.
CANDIDATES: dict[int, tuple[Tiling, ...]] = {
    1: (Gemv(64, 8), Gemv(128, 4)),
    2: (Gemv(128, 4), *_HOPPER),
    **dict.fromkeys((8, 16, 32, 40, 64, 96, 128, 160), _HOPPER),
}
_GEMV: dict[Reads, dict[int, tuple[Tiling, ...]]] = {
    "int8": {
        1: (
            *(Gemv(256, 4, "int8"), Gemv(512, 4, "int8"), Gemv(64, 8, "int8")),
            *(Gemv(256, 4, "int8", apart=True), Gemv(512, 4, "int8", apart=True)),
        ),
        2: (Gemv(128, 4, "int8"),),
    },
    "fp8": {1: (Gemv(64, 8, "fp8"), Gemv(128, 4, "fp8"), Gemv(128, 8, "fp8"))},
}


def candidates(rows: int, *, int8: bool) -> tuple[Tiling, ...]:
    """Return the tilings to try for up to so many rows, a key of `CANDIDATES`.

    The first ones read the fewest bytes. On Hopper a weight that is also there as int8 is tried as
    bfloat16 only at one row, or where int8 is not tried.
    """
    tilings: tuple[Tiling, ...] = ()
    if int8 and rows <= _MOST_FEW_ROWS:
        tilings = small_candidates(rows, "int8", by_row=True)
    if rows == 1 or not (tilings and hopper.available()):
        tilings += CANDIDATES.get(rows, ())
    return _available(tilings)


def small_candidates(
    rows: int, reads: Reads, *, by_row: bool, rounds_inputs: bool = False
) -> tuple[Tiling, ...]:
    """Return the tilings that read a weight of 8 bits, for up to so many rows.

    `rows` is a key of `CANDIDATES` or `MANY_ROWS`. `by_row` says that each row of the weight has
    one scale, `rounds_inputs` that x may be rounded to 8 bits.
    """
    # In a chain of products float8 by a gemv is as fast as by Hopper's kernel, in a step it is not.
    gemv = by_row and not (reads == "fp8" and hopper.available())
    tilings: tuple[Tiling, ...] = _GEMV[reads].get(rows, ()) if gemv else ()
    few = rows <= _MOST_FEW_ROWS
    rounds = reads == "fp8" and rounds_inputs
    if rounds and not few:
        tiles: tuple[HopperTiles, ...] = _HOPPER if by_row else _HOPPER[:1]
        if rows <= _MOST_ROUNDED_ROWS or not by_row:
            tilings += tuple(replace(tiling, reads=reads, rounds=True) for tiling in tiles)
    elif rows <= _MOST_PARTS_ROWS:
        tiles = (*_HOPPER, HopperTiles(128, 66)) if few else (_HOPPER[0], _HOPPER[2])
        tilings += tuple(replace(tiling, reads=reads) for tiling in tiles)
    if reads == "int8" and by_row and not few:
        tilings += (Small(reads, 2), *((Small(reads),) if rounds_inputs else ()))
    if rounds and by_row and rows > 1 and not (few and hopper.available()):
        tilings += (Small(reads),)
    return _available(tilings)


def _available(tilings: tuple[Tiling, ...]) -> tuple[Tiling, ...]:
    return tuple(t for t in tilings if _runs(t))


def _runs(tiling: Tiling) -> bool:
    if isinstance(tiling, HopperTiles):
        return hopper.available()
    if tiling.reads == "fp8":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return True
