"""Linear layers that choose, for few rows, between cuBLAS and our own kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.cuda.gemm.candidates import CANDIDATES, candidates
from outrider.engine.cuda.gemm.tilings import OUTPUTS, Product, Tiling
from outrider.engine.layers.linear import PackedLinear
from outrider.engine.layers.ops import Use

_QUANTIZED_AT_ONCE = 4096  # rows of a weight, to bound the memory of temporary tensors


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight as int8 [outputs, inner] times float32 scales [outputs].

    Every row's largest number becomes 127 or -127.
    """

    numbers: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Round a weight [outputs, inner] to the nearest."""
        numbers = torch.empty_like(weight, dtype=torch.int8)
        scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        parts = (torch.split(each, _QUANTIZED_AT_ONCE) for each in (weight, numbers, scales))
        for rows, quantized, scale in zip(*parts, strict=True):
            exact = rows.float()
            scale.copy_(exact.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / 127)
            quantized.copy_(torch.round(exact / scale[:, None]))
        return cls(numbers, scales)


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

    Layers of the same shape and use may share `choices`. Its keys are those of `CANDIDATES`, the
    largest number of rows that a choice is for.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, None)
        self.choices: dict[int, Tiling] = {}
        self._int8: Int8Weight | None = None

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] in bfloat16."""
        return self._weight

    def quantize(self) -> None:
        """Allow tilings that read int8 from now on."""
        self._int8 = Int8Weight.of(self.weight)

    def candidates(self, rows: int) -> tuple[Tiling, ...]:
        """Return the tilings to try for up to so many rows, a key of `CANDIDATES`."""
        return candidates(rows, int8=self._int8 is not None)

    def choose(self, rows: int, tiling: Tiling | None) -> None:
        """Take a tiling, or None for cuBLAS, for up to so many rows, a key of `CANDIDATES`."""
        self.choices.pop(rows, None)
        if tiling is not None:
            self.choices[rows] = tiling

    def choice(self, rows: int) -> Tiling | None:
        """Return the tiling for this number of rows, or None for cuBLAS.

        A step in mid-prompt has no rows with logits, which cuBLAS computes, too.
        """
        return self.choices.get(next((most for most in CANDIDATES if 0 < rows <= most), 0))

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
        tiling(Product(x.contiguous(), *self._read_by(tiling), residual, add=True))
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

        The tiling must be one that `norms` if a norm is given.
        """
        tiling(Product(x.contiguous(), *self._read_by(tiling), out, norm, eps, gated))
        return out

    def _read_by(self, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Return the weight and the scales."""
        if not tiling.int8:
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
        return cls(name, linear.out_features, linear.in_features)

    def __str__(self) -> str:
        return f"{self.name} {self.outputs}x{self.inner}"
