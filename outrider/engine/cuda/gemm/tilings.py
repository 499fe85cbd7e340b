"""The kernels for products of few rows, and how they divide a weight among programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.kernels.gemm import gemv_kernel, int8_gemv_kernel, int8_hi_lo_kernel
from outrider.engine.cuda.launch import launch_options, row_warps

_MAX_INNER = 16384  # numbers of a weight's row, which a gemv program holds whole
OUTPUTS = 128  # divides the rows of every weight; a gated one has two halves


@dataclass(frozen=True, slots=True)
class Product:
    """The product `out` [rows, outputs] of x [rows, inner] and a weight."""

    x: Tensor
    weight: Tensor  # [outputs, inner]; if gated [2 * outputs, inner], the gates first
    scales: Tensor  # float32, one for each row of an int8 weight; else unused
    out: Tensor
    norm: Tensor | None = None  # [inner]: x is normed
    eps: float = 0.0
    gated: bool = False  # the output is silu(gate) * up
    add: bool = False  # to the contents of `out`


@dataclass(frozen=True, slots=True)
class Gemv:
    """How `gemv_kernel` divides a weight among its programs."""

    per_thread: int  # numbers of the weight in registers
    warps: int
    int8: bool = False  # reads the int8 weight

    norms: ClassVar[bool] = True

    def takes(self, _outputs: int, inner: int) -> bool:
        """Return whether a weight may have this shape."""
        return inner <= _MAX_INNER

    def __call__(self, product: Product) -> None:
        x, out = product.x, product.out
        block = triton.next_power_of_2(x.shape[1])
        weight_rows = self.per_thread * 32 * self.warps // block
        per_output = len(product.weight) // out.shape[1]
        outputs = min(OUTPUTS // 2, max(1, weight_rows // per_output))
        norm = x if product.norm is None else product.norm
        kinds = (product.norm is not None, product.gated, product.add)
        rows = triton.next_power_of_2(len(x))
        options = {"num_warps": self.warps, **launch_options()}
        if self.int8:
            words = product.weight.view(torch.int32)
            reads = (x, words, product.scales, norm, out, *out.shape, words.shape[1], product.eps)
            int8_gemv_kernel[(out.shape[1] // outputs,)](
                *reads, *kinds, rows, outputs, block // 4, x.is_cuda, **options
            )
        else:
            reads = (x, product.weight, norm, out, *out.shape, x.shape[1], product.eps)
            gemv_kernel[(out.shape[1] // outputs,)](*reads, *kinds, rows, outputs, block, **options)


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How `hopper_gemm_kernel` divides a weight among its programs."""

    weight_rows: int  # per program, 128 or 256
    programs: int  # at most, among which tiles are divided
    resident: int = 1  # programs on a multiprocessor
    int8: bool = False  # reads the int8 weight

    @property
    def norms(self) -> bool:
        return self.int8  # the kernel that splits x norms it, too

    def takes(self, outputs: int, inner: int) -> bool:
        """Return whether a weight may have this shape."""
        return outputs % self.weight_rows == 0 and inner % hopper.INNER == 0

    def variant(
        self, rows: int, outputs: int, inner: int, *, gated: bool, add: bool
    ) -> hopper.Variant:
        """Return the variant for x [rows, inner] and a weight [outputs, inner]."""
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
        x, units = _hi_lo(product) if self.int8 else (product.x, product.x)
        variant = self.variant(len(out), *weight.shape, gated=product.gated, add=product.add)
        early = launch_options()["PDL"]
        hopper.launch(variant, x, weight, out, units, product.scales, early=early)


def _hi_lo(product: Product) -> tuple[Tensor, Tensor]:
    """Return x, normed if asked, as int8 [2, rows, inner] and its units float32 [rows]."""
    x = product.x
    hi_lo = torch.empty(2, *x.shape, dtype=torch.int8, device=x.device)
    units = torch.empty(len(x), dtype=torch.float32, device=x.device)
    norm = x if product.norm is None else product.norm
    block = triton.next_power_of_2(x.shape[1])
    int8_hi_lo_kernel[(len(x),)](
        *(x, norm, hi_lo, units, x.shape[1], product.eps),
        *(product.norm is not None, block),
        num_warps=row_warps(block),
        **launch_options(),
    )
    return hi_lo, units


Tiling = Gemv | HopperTiles
