"""How products of few rows are divided among programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.kernels.planes import (
    block_plane_kernel,
    plane_tile_kernel,
    planes_kernel,
)
from outrider.engine.cuda.kernels.products import int8_strip_kernel, strip_kernel
from outrider.engine.cuda.kernels.tiles import tile_kernel
from outrider.engine.cuda.launch import launch_options, row_warps

_MAX_STRIP = 16384  # numbers of a row of the weight, which a strip holds whole
OUTPUTS = 128  # divides the rows of every weight; a gated one has two halves
_TILES = 256  # at most of which the inner dimension is shared
_PARTIAL = 2**22 + 2**15  # numbers that their programs leave for each other: sums, x's squares


@dataclass(frozen=True, slots=True)
class Product:
    """`out` [rows, outputs] of x [rows, inner]."""

    x: Tensor
    weight: Tensor  # [outputs, inner]; if gated [2 * outputs, inner], the gates first
    scales: Tensor  # float32, one for each row of an int8 weight; of another nothing is read
    out: Tensor
    norm: Tensor | None = None  # [inner]: x is normed
    eps: float = 0.0
    gated: bool = False  # the output is silu(gate) * up
    add: bool = False  # to what is in `out`

    def outputs_per_program(self, weight_rows: int) -> int:
        return weight_rows // (len(self.weight) // self.out.shape[1])


@dataclass(frozen=True, slots=True)
class Gemv:
    """How `strip_kernel` divides a weight among its programs."""

    per_thread: int  # numbers of the weight in registers
    warps: int
    int8: bool = False  # reads the weight that is quantized

    norms: ClassVar[bool] = True

    def takes(self, _outputs: int, inner: int) -> bool:
        """Whether a weight may have this shape."""
        return inner <= _MAX_STRIP

    def __call__(self, product: Product) -> None:
        x, out = product.x, product.out
        block = triton.next_power_of_2(x.shape[1])
        weight_rows = self.per_thread * 32 * self.warps // block
        outputs = min(OUTPUTS // 2, max(1, product.outputs_per_program(weight_rows)))
        norm = x if product.norm is None else product.norm
        kinds = (product.norm is not None, product.gated, product.add)
        rows = triton.next_power_of_2(len(x))
        options = {"num_warps": self.warps, **launch_options()}
        if self.int8:
            words = product.weight.view(torch.int32)
            reads = (x, words, product.scales, norm, out, *out.shape, words.shape[1], product.eps)
            int8_strip_kernel[(out.shape[1] // outputs,)](
                *reads, *kinds, rows, outputs, block // 4, x.is_cuda, **options
            )
        else:
            reads = (x, product.weight, norm, out, *out.shape, x.shape[1], product.eps)
            strip_kernel[(out.shape[1] // outputs,)](
                *reads, *kinds, rows, outputs, block, **options
            )


@dataclass(frozen=True, slots=True)
class _Tiled:
    """A weight divided into tiles, and where these are few among programs of a tile."""

    weight_rows: int  # per program; a power of two, at least 32
    inner: int  # of each of them at a time; a power of two, at least 64
    stages: int
    warps: int
    programs: int  # at most, among which tiles are divided; a power of two

    def takes(self, _outputs: int, inner: int) -> bool:
        """Whether a weight may have this shape."""
        return inner % self.inner == 0

    def _launch(
        self,
        kernel: triton.JITFunction,
        reads: Sequence[Tensor | float],
        product: Product,
        *kinds: bool,
        least_rows: int = 16,
    ) -> None:
        """`reads` and `kinds` are the kernel's first and last arguments."""
        out, inner = product.out, product.x.shape[1]
        rows = max(least_rows, triton.next_power_of_2(len(out)))
        outputs = product.outputs_per_program(self.weight_rows)
        tiles = out.shape[1] // outputs
        splits = _splits(tiles, inner // self.inner, self.programs)
        kernel[(tiles * splits,)](
            *reads,
            out,
            *_workspace(out.device, tiles, splits, (self.weight_rows + 1) * rows),
            *out.shape,
            inner,
            inner // splits,
            product.gated,
            product.add,
            rows,
            outputs,
            self.inner,
            self.stages,
            *kinds,
            num_warps=self.warps,
            **launch_options(),
        )


@dataclass(frozen=True, slots=True)
class Tiles(_Tiled):
    """How `tile_kernel` divides a weight among its programs."""

    weight_left: bool = False  # of the operands of tensor cores; weight_rows are at least 64 then

    norms: ClassVar[bool] = False
    int8: ClassVar[bool] = False

    def __call__(self, product: Product) -> None:
        self._launch(tile_kernel, (product.x, product.weight), product, self.weight_left)


@dataclass(frozen=True, slots=True)
class Int8HiLo(_Tiled):
    """How `plane_tile_kernel` divides a weight that is quantized among its programs.

    `weight_rows` are at least 64, `inner` at least 128.
    """

    norms: ClassVar[bool] = True
    int8: ClassVar[bool] = True

    def __call__(self, product: Product) -> None:
        reads = (*_planes(product), product.weight, product.scales)
        self._launch(plane_tile_kernel, reads, product)


@dataclass(frozen=True, slots=True)
class Int8HiLoBlocks(_Tiled):
    """How `block_plane_kernel` divides a weight that is quantized among its programs.

    `weight_rows` are at least 64, `inner` from 128 to 512.
    """

    norms: ClassVar[bool] = True
    int8: ClassVar[bool] = True

    def __call__(self, product: Product) -> None:
        norm = product.x if product.norm is None else product.norm
        reads = (product.x, norm, product.eps, product.weight, product.scales)
        kinds = (product.norm is not None, product.x.is_cuda)
        self._launch(block_plane_kernel, reads, product, *kinds, least_rows=8)


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How `bulk_tile_kernel` divides a weight among its programs."""

    weight_rows: int  # per program, 128 or 256
    programs: int  # at most, among which tiles are divided
    resident: int = 1  # programs on a multiprocessor
    int8: bool = False  # reads the weight that is quantized

    @property
    def norms(self) -> bool:
        return self.int8  # as it makes planes of x

    def takes(self, outputs: int, inner: int) -> bool:
        """Whether a weight may have this shape."""
        return outputs % self.weight_rows == 0 and inner % hopper.INNER == 0

    def variant(
        self, rows: int, outputs: int, inner: int, *, gated: bool, add: bool
    ) -> hopper.Variant:
        """What computes this of x [rows, inner] and a weight [outputs, inner]."""
        splits = self.programs * self.weight_rows // outputs
        return hopper.Variant(
            rows=8 * triton.cdiv(rows, 8),
            groups=self.weight_rows // hopper.GROUP_ROWS,
            resident=self.resident,
            splits=max(1, min(splits, hopper.MOST_SPLITS, inner // hopper.INNER)),
            gated=gated,
            add=add,
            int8=self.int8,
        )

    def __call__(self, product: Product) -> None:
        weight, out = product.weight, product.out
        x, units = _planes(product) if self.int8 else (product.x, product.x)
        variant = self.variant(len(out), *weight.shape, gated=product.gated, add=product.add)
        early = launch_options()["PDL"]
        hopper.launch(variant, x, weight, out, units, product.scales, early=early)


def _planes(product: Product) -> tuple[Tensor, Tensor]:
    """x as int8 [2, rows, inner], normed if it is to be, and its units float32 [rows]."""
    x = product.x
    planes = torch.empty(2, *x.shape, dtype=torch.int8, device=x.device)
    units = torch.empty(len(x), dtype=torch.float32, device=x.device)
    norm = x if product.norm is None else product.norm
    block = triton.next_power_of_2(x.shape[1])
    planes_kernel[(len(x),)](
        *(x, norm, planes, units, x.shape[1], product.eps),
        *(product.norm is not None, block),
        num_warps=row_warps(block),
        **launch_options(),
    )
    return planes, units


def _splits(tiles: int, blocks: int, programs: int) -> int:
    """Among how many programs each of the tiles is divided, of `blocks` of the inner dimension."""
    splits = 1
    while 2 * splits * tiles <= programs and blocks % (2 * splits) == 0:
        splits *= 2
    return splits


def _workspace(
    device: torch.device, tiles: int, splits: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """What programs of one tile leave for each other: float32, and zeros int32."""
    partial, arrived = _left_by_programs(device)
    assert splits == 1 or (tiles <= len(arrived) and tiles * splits * numbers <= len(partial))
    return partial, arrived


@cache
def _left_by_programs(device: torch.device) -> tuple[Tensor, Tensor]:
    # One product uses it at a time: the next one waits for it.
    partial = torch.empty(_PARTIAL, device=device)
    return partial, torch.zeros(_TILES, dtype=torch.int32, device=device)


Tiling = Gemv | Tiles | Int8HiLo | Int8HiLoBlocks | HopperTiles
