"""Linear layers that choose, for few rows, between cuBLAS and kernels of our own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from outrider.engine.cuda.kernels.products import strip_kernel
from outrider.engine.cuda.launch import launch_options
from outrider.engine.linear import PackedLinear

_MAX_INNER = 16384  # a program holds whole rows of the weight
_OUTPUTS = 128  # divides the rows of every weight; a gated one has two halves


@dataclass(frozen=True, slots=True)
class Strips:
    """How `strip_kernel` divides a weight among its programs."""

    per_thread: int  # numbers of the weight in registers
    warps: int

    def outputs(self, inner: int) -> int:
        """Rows of the weight [out, inner] per program."""
        block: int = triton.next_power_of_2(inner)
        return min(_OUTPUTS // 2, max(1, self.per_thread * 32 * self.warps // block))


# What is tried for up to so many rows of x. At 4 and 8 rows strips won alone, but lost to cuBLAS
# within a step (H200, 8B: 3 % at 5 and 8 rows).
CANDIDATES: dict[int, tuple[Strips, ...]] = {
    1: (Strips(64, 4), Strips(128, 4), Strips(64, 8), Strips(128, 8)),
    2: (Strips(64, 4), Strips(128, 4), Strips(64, 8)),
}


def fits(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `FewRowsLinear` can hold this weight [out, in]."""
    outputs, inner = weight.shape
    return (
        bias is None
        and weight.is_cuda
        and weight.dtype is torch.bfloat16
        and outputs % _OUTPUTS == 0
        and inner % 8 == 0
        and inner <= _MAX_INNER
    )


class FewRowsLinear(PackedLinear):
    """A `Linear` over a weight that `fits`. What `choices` does not name cuBLAS computes.

    `choices` may be shared with other layers of the same shape and use; its keys are those of
    `CANDIDATES`, the largest number of rows that a choice is for.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, None)
        self.choices: dict[int, Strips] = {}

    def choice(self, rows: int) -> Strips | None:
        """How this number of rows is computed; None: by cuBLAS."""
        return self.choices.get(triton.next_power_of_2(rows))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)`, in `residual`."""
        way = self.choice(len(x))
        if way is None:
            return super().add(x, residual)
        return self.strips(way, x, residual, add=True)

    def strips(
        self,
        way: Strips,
        x: Tensor,
        out: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        *,
        gated: bool = False,
        add: bool = False,
    ) -> Tensor:
        """Into `out` [rows, outputs]: the product of x [rows, in], normed if `norm` is given;
        silu(gate) * up of its halves if `gated`; added to what is there if `add`."""
        rows, outputs = out.shape
        per_program = way.outputs(2 * self.in_features if gated else self.in_features)
        strip_kernel[(outputs // per_program,)](
            x.contiguous(),
            self._weight,
            x if norm is None else norm,
            out,
            rows,
            outputs,
            self.in_features,
            eps,
            norm is not None,
            gated,
            add,
            triton.next_power_of_2(rows),
            per_program,
            triton.next_power_of_2(self.in_features),
            num_warps=way.warps,
            **launch_options(),
        )
        return out
