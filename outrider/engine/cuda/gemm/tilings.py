"""The kernels for products of few rows, and how they divide a weight among programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.hopper import Reads
from outrider.engine.cuda.kernels.gemm import (
    gemv_kernel,
    int8_gemv_kernel,
    scale_kernel,
    split_kernel,
)
from outrider.engine.cuda.kernels.pointwise import silu_mul_kernel
from outrider.engine.cuda.launch import launch_options, row_warps

_MAX_INNER = 16384  # numbers of a weight's row, which a gemv program holds whole
_BLOCK = 1024  # numbers of a program that scales sums
_LEAST_ROWS = 128  # of the library's product of float8: fewer have not been tried
OUTPUTS = 128  # divides the rows of every weight; a gated one has two halves


@dataclass(frozen=True, slots=True)
class Product:
    """The product `out` [rows, outputs] of x [rows, inner] and a weight."""

    x: Tensor  # if `silu` [rows, 2 * inner], of which silu(gate) * up is multiplied
    weight: Tensor  # [outputs, inner]; if gated [2 * outputs, inner], the gates first
    scales: Tensor  # float32, of the rows or blocks of a weight of 8 bits; else unused
    out: Tensor
    norm: Tensor | None = None  # [inner]: x is normed
    eps: float = 0.0
    gated: bool = False  # the output is silu(gate) * up
    add: bool = False  # to the contents of `out`
    scale_rows: int = 0  # of a block of the weight with one scale; 0: each row has one
    silu: bool = False  # only for tilings that split x


@dataclass(frozen=True, slots=True)
class Gemv:
    """How `gemv_kernel` divides a weight among its programs."""

    per_thread: int  # numbers of the weight in registers
    warps: int
    reads: Reads = "bf16"
    apart: bool = False  # x is made int8 in a launch before; else by each program

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
        if self.reads == "int8":
            words, units = product.weight.view(torch.int32), x
            if self.apart:
                x, units = split_inputs(product, torch.int8, planes=2)
                x = x.view(torch.int32)
                kinds = (False, *kinds[1:])
            reads = (x, units, words, product.scales, norm, out, *out.shape, words.shape[1])
            int8_gemv_kernel[(out.shape[1] // outputs,)](
                *(*reads, product.eps, *kinds, self.apart, rows, outputs, block // 4),
                x.is_cuda,
                **options,
            )
        else:
            reads = (x, product.weight, product.scales, norm, out, *out.shape, x.shape[1])
            gemv_kernel[(out.shape[1] // outputs,)](
                *reads, product.eps, *kinds, self.reads == "fp8", rows, outputs, block, **options
            )


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How `hopper_gemm_kernel` divides a weight among its programs."""

    weight_rows: int  # per program, 128 or 256
    programs: int  # at most, among which tiles are divided
    resident: int = 1  # programs on a multiprocessor
    reads: Reads = "bf16"
    rounds: bool = False  # x to float8; else float8 of a weight becomes 16-bit

    @property
    def norms(self) -> bool:
        return self.reads != "bf16"  # the kernel that splits x norms it, too

    @property
    def most_rows(self) -> int:
        """Rows of x at once, for which a thread has registers. Of more, each part reads all."""
        if self.reads == "bf16" or self.rounds:
            return 160
        return 128 if self.weight_rows == 128 and self.resident == 1 else 96

    def _part(self, rows: int) -> int:
        """Return the rows of each part, of which the last may have fewer."""
        parts = -(-rows // self.most_rows)
        return -(-rows // (8 * parts)) * 8

    def takes(self, outputs: int, inner: int) -> bool:
        """Return whether a weight may have this shape."""
        return outputs % self.weight_rows == 0 and inner % hopper.INNER == 0

    def variant(
        self, rows: int, outputs: int, inner: int, *, gated: bool, add: bool, scale_rows: int = 0
    ) -> hopper.Variant:
        """Return the variant for x [rows, inner], or a part, and a weight [outputs, inner]."""
        splits = self.programs * self.weight_rows // outputs
        return hopper.Variant(
            rows=self._part(rows),
            groups=self.weight_rows // hopper.GROUP_ROWS,
            resident=self.resident,
            splits=max(1, min(splits, hopper.MOST_SPLITS, inner // hopper.INNER)),
            gated=gated,
            add=add,
            reads=self.reads,
            scale_rows=scale_rows,
            rounded=self.rounds,
        )

    def __call__(self, product: Product) -> None:
        size = self._part(len(product.out))
        for x, out in zip(
            torch.split(product.x, size), torch.split(product.out, size), strict=True
        ):
            self._multiply(replace(product, x=x, out=out))

    def _multiply(self, product: Product) -> None:
        weight, out = product.weight, product.out
        x, units = product.x, product.x
        if self.reads == "int8":
            x, units = split_inputs(product, torch.int8, planes=2)
        elif self.reads == "fp8":
            x, units = split_inputs(product, torch.float8_e4m3fn if self.rounds else torch.float16)
        variant = self.variant(
            len(out),
            *weight.shape,
            gated=product.gated,
            add=product.add,
            scale_rows=product.scale_rows,
        )
        early = launch_options()["PDL"]
        hopper.launch(variant, x, weight, out, units, product.scales, early=early)


@dataclass(frozen=True, slots=True)
class Small:
    """Multiplies 8 bits by torch's library; x has one plane of 8 bits, or for int8 two."""

    reads: Reads
    planes: int = 1  # one alone is x rounded to 8 bits, with a scale for each row

    norms: ClassVar[bool] = True

    def takes(self, outputs: int, inner: int) -> bool:
        """Return whether a weight may have this shape."""
        return outputs % 16 == 0 and inner % 16 == 0

    def __call__(self, product: Product) -> None:
        out, scales = product.out, product.scales
        rows = max(len(out), _LEAST_ROWS) if self.reads == "fp8" else len(out)
        planes, units = split_inputs(product, product.weight.dtype, self.planes, rows)
        direct = rows == len(out) and not (product.gated or product.add)
        sums = out if direct else out.new_empty(rows, len(product.weight))
        if self.reads == "int8":
            whole = torch._int_mm(planes.flatten(0, 1), product.weight.t())
            grid = (len(sums), triton.cdiv(sums.shape[1], _BLOCK))
            scale_kernel[grid](
                *(whole, units, scales, sums, sums.shape[1], self.planes, _BLOCK), num_warps=4
            )
        else:
            torch._scaled_mm(
                planes[0],
                product.weight.t(),
                scale_a=units[:, None],
                scale_b=scales.view(1, -1),
                out_dtype=sums.dtype,
                use_fast_accum=True,
                out=sums,
            )
        if product.gated:
            grid = (len(out), triton.cdiv(out.shape[1], _BLOCK))
            silu_mul_kernel[grid](sums, out, out.shape[1], _BLOCK, num_warps=4, **launch_options())
        elif product.add:
            out += sums[: len(out)]
        elif not direct:
            out.copy_(sums[: len(out)])


def split_inputs(
    product: Product, dtype: torch.dtype, planes: int = 1, rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Return x, normed if asked, as planes [planes, rows, inner] and its units float32 [rows].

    One plane alone may be padded to more `rows`, of any numbers.
    """
    x, inner = product.x, product.weight.shape[1]
    rows = max(len(x), rows)
    hi_lo = torch.empty(planes, rows, inner, dtype=dtype, device=x.device)
    units = torch.empty(rows, dtype=torch.float32, device=x.device)
    norm = x if product.norm is None else product.norm
    block = triton.next_power_of_2(inner)
    split_kernel[(len(x),)](
        *(x, norm, hi_lo, units, inner, product.eps),
        *(product.norm is not None, product.silu, planes, block),
        num_warps=row_warps(block),
        **launch_options(),
    )
    return hi_lo, units


Tiling = Gemv | HopperTiles | Small
