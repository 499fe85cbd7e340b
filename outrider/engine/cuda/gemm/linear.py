"""Linear layers that choose, for few rows, between cuBLAS and our own kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.cuda.gemm.candidates import CANDIDATES, MANY_ROWS, candidates
from outrider.engine.cuda.gemm.hopper import Variant
from outrider.engine.cuda.gemm.tilings import OUTPUTS, HopperTiles, Product, Tiling
from outrider.engine.layers.linear import PackedLinear
from outrider.engine.layers.ops import Use
from outrider.engine.layers.quantized import QuantizedWeight

_ROWS = (*CANDIDATES, *MANY_ROWS)


def fits(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `FewRowsLinear` can hold this weight [out, in]."""
    outputs, inner = weight.shape
    return (
        bias is None
        and weight.is_cuda
        and weight.dtype is torch.bfloat16
        and outputs % OUTPUTS == 0
        and inner % 8 == 0
    )


class FewRowsLinear(PackedLinear):
    """A `Linear` over a weight that `fits`; cuBLAS computes rows without a choice.

    Layers of the same shape and use may share `choices`. Its keys are those of `CANDIDATES` and
    `MANY_ROWS`, the largest number of rows that a choice is for.
    """

    kind = ""
    """Name of the weight's use, which distinguishes it from others of its shape."""
    _scale_rows = 0  # of a block of the weight with one scale; 0: each row has one

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, None)
        self.choices: dict[int, Tiling] = {}
        self._int8: QuantizedWeight | None = None

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] in bfloat16."""
        return self._weight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and outputs."""
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def nbytes(self) -> int:
        """Bytes of the weight that one product reads."""
        return self._weight.nbytes

    def variant(self, tiling: HopperTiles, rows: int, *, gated: bool, add: bool) -> Variant:
        """Return the kernel that computes so many rows by a tiling."""
        shape = (self.out_features, self.in_features)
        return tiling.variant(rows, *shape, gated=gated, add=add, scale_rows=self._scale_rows)

    def quantize(self) -> None:
        """Allow tilings that read int8 from now on."""
        self._int8 = QuantizedWeight.of(self.weight, torch.int8, rounds_inputs=False)

    def candidates(self, rows: int) -> tuple[Tiling, ...]:
        """Return the tilings to try for up to so many rows, a key of `choices`."""
        return candidates(rows, int8=self._int8 is not None)

    def choose(self, rows: int, tiling: Tiling | None) -> None:
        """Take a tiling, or None for cuBLAS, for up to so many rows, a key of `choices`."""
        self.choices.pop(rows, None)
        if tiling is not None:
            self.choices[rows] = tiling

    def choice(self, rows: int) -> Tiling | None:
        """Return the tiling for this number of rows, or None for cuBLAS.

        A step in mid-prompt has no rows with logits, which cuBLAS computes, too.
        """
        return self.choices.get(next((most for most in _ROWS if 0 < rows <= most), 0))

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map x [..., in] to [..., out], in `out` if it is given."""
        tiling = self.choice(len(x)) if x.dim() == 2 else None
        if tiling is None:
            return super().forward(x, out)
        return self.fused(tiling, x, x.new_empty(len(x), self.out_features) if out is None else out)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `self(x)` to `residual` and return it."""
        tiling = self.choice(len(x))
        if tiling is None:
            return super().add(x, residual)
        if self.bias is not None:
            residual += self.bias
        tiling(self._product(tiling, x, residual, add=True))
        return residual

    def fused(
        self,
        tiling: Tiling,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        *,
        gated: bool = False,
    ) -> Tensor:
        """Compute `out` [rows, outputs] of x [rows, in], normed and gated as asked.

        The tiling must be one that `norms` if a norm is given. A gated layer has no bias.
        """
        assert not (gated and self.bias is not None)
        tiling(self._product(tiling, x, out, norm=norm, eps=eps, gated=gated))
        if self.bias is not None:
            out += self.bias
        return out

    def _product(self, tiling: Tiling, x: Tensor, out: Tensor, **how: Any) -> Product:
        """Return the product by a tiling; `how` are further fields."""
        read = self._read_by(tiling)
        return Product(x.contiguous(), *read, out, scale_rows=self._scale_rows, **how)

    def _read_by(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the weight and the scales."""
        if tiling.reads == "bf16":
            return self.weight, self.weight
        assert self._int8 is not None
        return self._int8.numbers, self._int8.scales


@dataclass(frozen=True, slots=True)
class Kind:
    """Uses of equal shape, which share their tilings."""

    name: str
    outputs: int
    inner: int

    @classmethod
    def of(cls, use: Use, linear: FewRowsLinear) -> Kind:
        """Return the kind of this use of this layer."""
        if use.norm is None:
            name = "alone" if use.alone else "added"
        else:
            name = "gated" if use.gated else "normed"
        return cls(linear.kind + name, linear.out_features, linear.in_features)

    def __str__(self) -> str:
        return f"{self.name} {self.outputs}x{self.inner}"
