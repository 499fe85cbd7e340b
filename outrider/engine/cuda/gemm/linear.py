"""Linear layers that choose, for few rows, between cuBLAS and kernels of our own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.cuda.gemm.candidates import CANDIDATES, candidates
from outrider.engine.cuda.gemm.tilings import OUTPUTS, Product, Tiling
from outrider.engine.model.linear import PackedLinear

_QUANTIZED_AT_ONCE = 4096  # rows of a weight, to bound what lies in memory beside it


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
        and outputs % OUTPUTS == 0
        and inner % 8 == 0
    )


class FewRowsLinear(PackedLinear):
    """A `Linear` over a weight that `fits`. What `choices` does not name cuBLAS computes.

    `choices` may be shared with other layers of the same shape and use; its keys are those of
    `CANDIDATES`, the largest number of rows that a choice is for.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, None)
        self.choices: dict[int, Tiling] = {}
        self._int8: Int8Weight | None = None

    @property
    def weight(self) -> Tensor:
        """[out, in], not quantized."""
        return self._weight

    def quantize(self) -> None:
        """Ways that read int8 may be chosen from now on."""
        self._int8 = Int8Weight.of(self.weight)

    def candidates(self, rows: int) -> tuple[Tiling, ...]:
        """The ways to choose among for up to so many rows, a key of `CANDIDATES`."""
        return candidates(rows, int8=self._int8 is not None)

    def choice(self, rows: int) -> Tiling | None:
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
        way: Tiling,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        *,
        gated: bool = False,
    ) -> Tensor:
        """Into `out` [rows, outputs]: the product of x [rows, in], normed if `norm` is given, which
        the way must do; silu(gate) * up of its halves if `gated`.
        """
        way(Product(x.contiguous(), *self._read_by(way), out, norm, eps, gated))
        return out

    def _read_by(self, way: Tiling) -> tuple[Tensor, Tensor]:
        """Weight and scales."""
        if not way.int8:
            return self.weight, self.weight
        assert self._int8 is not None
        return self._int8.numbers, self._int8.scales
