"""A linear layer over bfloat16 weights, by a compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.engine.cpu import gemm
from outrider.engine.cpu.team import Kernel


def fits(weight: Tensor) -> bool:
    """Return whether `CompiledLinear` holds this weight [out, in] and is faster than oneDNN."""
    return (
        weight.dtype is torch.bfloat16
        and weight.shape[0] % gemm.COLUMNS == 0
        and torch.cpu._is_avx512_supported()
        and not torch.cpu._is_amx_tile_supported()
    )


def pack(weight: Tensor) -> Tensor:
    """Return int32 [out / 32, in, 16]; columns i and 16 + i of a block of 32 share a word."""
    outputs, inputs = weight.shape
    halves = weight.detach().view(torch.int16)
    blocks = halves.reshape(outputs // gemm.COLUMNS, 2, -1, inputs)
    return blocks.permute(0, 3, 2, 1).contiguous().view(torch.int32)


class CompiledLinear(nn.Module):
    """`F.linear` with a fixed weight that `fits`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = pack(weight)
        self._bias = None if bias is None else bias.detach()
        self._kernel = Kernel(gemm.linear, "7q", weight.dtype)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map x [..., in] to [..., out], in `out` if it is given."""
        y = self._run(x, 0)
        return y if out is None else out.copy_(y)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)`."""
        return self._run(x, residual.data_ptr())

    def _run(self, x: Tensor, residual: int) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        self._kernel(
            True,
            self.out_features // gemm.COLUMNS,
            x.data_ptr(),
            self._weight.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            residual,
            out.data_ptr(),
            self.in_features,
            x.numel() // self.in_features,
        )
        return out
