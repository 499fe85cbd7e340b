"""Linear layers that keep a weight of 8 bits and no other."""

from __future__ import annotations

import torch
import triton
from torch import Tensor, nn

from outrider.engine.cuda.gemm.candidates import small_candidates
from outrider.engine.cuda.gemm.hopper import INNER, Reads
from outrider.engine.cuda.gemm.linear import FewRowsLinear
from outrider.engine.cuda.gemm.tilings import OUTPUTS, Small, Tiling
from outrider.engine.cuda.kernels.gemm import dequantise_kernel
from outrider.engine.layers.quantized import QuantizedWeight

_READS: dict[torch.dtype, Reads] = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_BLOCK = 1024  # numbers of a program that dequantises


class QuantizedLinear(FewRowsLinear):
    """A `Linear` of bfloat16 over any weight of 8 bits.

    Rows without a choice are multiplied by cuBLAS with the weight dequantised to bfloat16, which
    takes its memory for that time.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        nn.Module.__init__(self)  # there is no weight of 16 bits to pack
        self.out_features, self.in_features = weight.shape
        self.choices = {}
        self.quantized = weight
        self.reads = _READS[weight.numbers.dtype]
        self._packed = False
        self.bias = None if bias is None else bias.detach().to(torch.bfloat16)
        rows, columns = weight.block
        self._scale_rows = 0 if weight.by_row else rows
        self._tiled = self.out_features % OUTPUTS == 0 and self.in_features % 8 == 0
        if not weight.by_row:
            self._tiled &= columns == INNER and rows in (1, INNER)
            self._tiled &= self.in_features % INNER == 0
        self.kind = f"{self.reads} " if weight.by_row else f"{self.reads} by {rows}x{columns} "

    @property
    def _weight(self) -> Tensor:  # type: ignore[override]
        """The weight [out, in] dequantised to bfloat16, made at each call."""
        numbers, scales = self.quantized.numbers, self.quantized.scales
        out = torch.empty(numbers.shape, dtype=torch.bfloat16, device=numbers.device)
        grid = (len(out), triton.cdiv(self.in_features, _BLOCK))
        sizes = (self.in_features, scales.shape[1], *self.quantized.block)
        dequantise_kernel[grid](numbers, scales, out, *sizes, _BLOCK, num_warps=4)
        return out

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and outputs."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.quantized.numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of the weight that one product reads."""
        return self.quantized.nbytes

    def quantize(self) -> None:
        """Do nothing: the weight has 8 bits."""

    def candidates(self, rows: int) -> tuple[Tiling, ...]:
        """Return the tilings to try for up to so many rows, a key of `choices`."""
        weight = self.quantized
        if not self._tiled:
            return ()
        return small_candidates(
            rows, self.reads, by_row=weight.by_row, rounds_inputs=weight.rounds_inputs
        )

    def add_gated(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        """Add `self(silu(gate) * up)` to `residual` [rows, out] and return it.

        The choice for so many rows must be a `Small`.
        """
        tiling = self.choice(len(gate_up))
        assert isinstance(tiling, Small)
        if self.bias is not None:
            residual += self.bias
        tiling(self._product(tiling, gate_up, residual, add=True, silu=True))
        return residual

    def _read_by(self, tiling: Tiling) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self.quantized.numbers, self.quantized.scales
