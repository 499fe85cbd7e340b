"""Linear layers that choose, for few rows, between cuBLAS and kernels of our own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.kernels.products import (
    int8_strip_kernel,
    strip_kernel,
    tile_kernel,
)
from outrider.engine.cuda.launch import launch_options
from outrider.engine.linear import PackedLinear

_MAX_STRIP = 16384  # numbers of a row of the weight, which a strip holds whole
_OUTPUTS = 128  # divides the rows of every weight; a gated one has two halves
_TILES = 256  # at most of which the inner dimension is shared
_QUANTIZED_AT_ONCE = 4096  # rows of a weight, to bound what lies in memory beside it
_PARTIAL = 2**22  # numbers that their programs leave for each other at most


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
class Strips:
    """How `strip_kernel` divides a weight among its programs."""

    per_thread: int  # numbers of the weight in registers
    warps: int
    int8: bool = False  # reads the weight that is quantized

    norms: ClassVar[bool] = True

    def takes(self, inner: int) -> bool:
        """Whether rows of a weight may be of this length."""
        return inner <= _MAX_STRIP

    def __call__(self, product: Product) -> None:
        x, out = product.x, product.out
        block = triton.next_power_of_2(x.shape[1])
        weight_rows = self.per_thread * 32 * self.warps // block
        outputs = min(_OUTPUTS // 2, max(1, product.outputs_per_program(weight_rows)))
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
class Tiles:
    """How `tile_kernel` divides a weight among its programs."""

    weight_rows: int  # per program; a power of two, at least 32
    inner: int  # of each of them at a time; a power of two, at least 64
    stages: int
    warps: int
    programs: int  # at most, among which tiles are divided; a power of two
    int8: bool = False  # reads the weight that is quantized
    weight_left: bool = False  # of the operands of tensor cores; weight_rows are at least 64 then

    norms: ClassVar[bool] = False

    def takes(self, inner: int) -> bool:
        """Whether rows of a weight may be of this length."""
        return inner % self.inner == 0

    def __call__(self, product: Product) -> None:
        x, out = product.x, product.out
        rows = max(16, triton.next_power_of_2(len(x)))
        outputs = product.outputs_per_program(self.weight_rows)
        tiles, blocks = out.shape[1] // outputs, x.shape[1] // self.inner
        splits = 1
        while 2 * splits * tiles <= self.programs and blocks % (2 * splits) == 0:
            splits *= 2
        partial, arrived = _workspace(x.device)
        if splits > 1:
            assert tiles <= len(arrived)
            assert tiles * splits * self.weight_rows * rows <= len(partial)
        tile_kernel[(tiles * splits,)](
            x,
            product.weight,
            product.scales,
            out,
            partial,
            arrived,
            *out.shape,
            x.shape[1],
            x.shape[1] // splits,
            product.gated,
            product.add,
            rows,
            outputs,
            self.inner,
            self.stages,
            self.weight_left,
            num_warps=self.warps,
            **launch_options(),
        )


@cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """What programs of one tile leave for each other: float32, and zeros int32. One product uses
    it at a time: the next one waits for it."""
    partial = torch.empty(_PARTIAL, device=device)
    return partial, torch.zeros(_TILES, dtype=torch.int32, device=device)


Way = Strips | Tiles

# What is tried for up to so many rows of x.
CANDIDATES: dict[int, tuple[Way, ...]] = {
    1: (Strips(64, 4), Strips(128, 4), Strips(64, 8)),
    2: (Strips(64, 4), Strips(128, 4), Strips(64, 8)),
    8: (Tiles(64, 256, 3, 4, 256), Tiles(32, 256, 4, 4, 256)),
    16: (Tiles(64, 256, 3, 4, 256), Tiles(32, 256, 4, 4, 256)),
    32: (
        Tiles(128, 128, 4, 8, 256),
        Tiles(32, 256, 4, 4, 256),
        Tiles(128, 128, 4, 4, 256, weight_left=True),
    ),
    64: (
        Tiles(128, 128, 4, 4, 256, weight_left=True),
        Tiles(128, 128, 4, 4, 512, weight_left=True),
    ),
}

# Beside these where weights may be quantized: half the bytes, which are taken apart first.
INT8_CANDIDATES: dict[int, tuple[Way, ...]] = {
    1: (Strips(256, 4, int8=True), Strips(512, 4, int8=True), Strips(128, 4, int8=True)),
    2: (Strips(256, 4, int8=True), Strips(512, 8, int8=True), Strips(128, 8, int8=True)),
    8: (Tiles(64, 256, 3, 4, 256, int8=True), Tiles(64, 512, 3, 4, 256, int8=True)),
    16: (Tiles(64, 256, 3, 4, 256, int8=True), Tiles(32, 512, 3, 4, 256, int8=True)),
    32: (Tiles(128, 256, 3, 8, 256, int8=True), Tiles(128, 128, 4, 8, 256, int8=True)),
    64: (),  # never chosen
}


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [outputs, inner] as int8, and float32 scales [outputs], by which it is multiplied.

    Every row's largest number becomes 127 or -127.
    """

    numbers: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Of a weight [outputs, inner], rounded to the nearest."""
        numbers = torch.empty_like(weight, dtype=torch.int8)
        scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        parts = (torch.split(each, _QUANTIZED_AT_ONCE) for each in (weight, numbers, scales))
        for rows, quantized, scale in zip(*parts, strict=True):
            exact = rows.float()
            scale.copy_(exact.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / 127)
            quantized.copy_(torch.round(exact / scale[:, None]))
        return cls(numbers, scales)


def fits(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `FewRowsLinear` can hold this weight [out, in]."""
    outputs, inner = weight.shape
    return (
        bias is None
        and weight.is_cuda
        and weight.dtype is torch.bfloat16
        and outputs % _OUTPUTS == 0
        and inner % 8 == 0
    )


class FewRowsLinear(PackedLinear):
    """A `Linear` over a weight that `fits`. What `choices` does not name cuBLAS computes.

    `choices` may be shared with other layers of the same shape and use; its keys are those of
    `CANDIDATES`, the largest number of rows that a choice is for.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, None)
        self.choices: dict[int, Way] = {}
        self._int8: Int8Weight | None = None

    def quantize(self) -> None:
        """Ways that read int8 may be chosen from now on."""
        self._int8 = Int8Weight.of(self._weight)

    def candidates(self, rows: int) -> tuple[Way, ...]:
        """The ways to choose among for up to so many rows, a key of `CANDIDATES`."""
        return CANDIDATES[rows] + (() if self._int8 is None else INT8_CANDIDATES[rows])

    def choice(self, rows: int) -> Way | None:
        """How this number of rows is computed; None: by cuBLAS, as none at all (in mid-prompt)."""
        return self.choices.get(next((most for most in CANDIDATES if 0 < rows <= most), 0))

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [..., in] to [..., out], in `out` if given."""
        way = self.choice(len(x)) if x.dim() == 2 else None
        if way is None:
            return super().forward(x, out)
        return self.fused(way, x, x.new_empty(len(x), self.out_features) if out is None else out)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)`, in `residual`."""
        way = self.choice(len(x))
        if way is None:
            return super().add(x, residual)
        way(Product(x.contiguous(), *self._read_by(way), residual, add=True))
        return residual

    def fused(
        self,
        way: Way,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        *,
        gated: bool = False,
    ) -> Tensor:
        """Into `out` [rows, outputs]: the product of x [rows, in], normed if `norm` is given, which
        the way must do; silu(gate) * up of its halves if `gated`."""
        way(Product(x.contiguous(), *self._read_by(way), out, norm, eps, gated))
        return out

    def _read_by(self, way: Way) -> tuple[Tensor, Tensor]:
        """Weight and scales."""
        if not way.int8:
            return self._weight, self._weight
        assert self._int8 is not None
        return self._int8.numbers, self._int8.scales
