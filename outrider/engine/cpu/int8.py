"""Products with weights rounded to int8, by a compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numba.core.registry import cpu_target
from torch import Tensor

from outrider.engine.cpu.int8_linear import BLOCK, Input, int8_linear
from outrider.engine.cpu.team import Kernel
from outrider.engine.layers.linear import Linear, PackedLinear
from outrider.engine.layers.quantized import QuantizedWeight

_LINE = 64  # bytes of a cache line
_TEAM_SIZE = 1 << 18  # weights from which a team of threads is faster


def lay_in_order(weights: Sequence[Int8Weight]) -> None:
    """Move weights into one block, in the order in which they are multiplied with.

    A kernel prefetches beyond the weight that it reads. NumPy asks for huge pages, within which
    the processor prefetches, too.
    """
    sizes = [weight.numbers.numel() for weight in weights]
    memory = torch.from_numpy(np.empty(sum(sizes) + _LINE, np.uint8))
    start = -memory.data_ptr() % _LINE
    parts = torch.split(memory[start : start + sum(sizes)], sizes)
    for weight, part in zip(weights, parts, strict=True):
        weight.numbers = part.view(weight.numbers.shape).copy_(weight.numbers)


def available() -> bool:
    """Return whether the CPU that kernels are compiled for has AVX-512 VNNI."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+avx512vnni" in features


def rounded(linear: Linear) -> Int8Weight | None:
    """Return what multiplies in place of a linear layer's weight, if that was rounded."""
    found = linear.int8 if isinstance(linear, PackedLinear) else None
    return found if isinstance(found, Int8Weight) else None


class Int8Weight:
    """Implements `Int8Product`: weight [out, in] has one scale a row, and so has an input.

    Sums are exact, so a row's product does not depend on the rows beside it. `numbers` are those of
    int8 plus 128, uint8 [blocks, in / 4, BLOCK, 4], and `scales` float32 [blocks * BLOCK].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Round `weight`, of which `in` is a multiple of 4. Inputs and outputs have its dtype."""
        rounded = QuantizedWeight.of(weight, torch.int8, rounds_inputs=True)
        self.out_features, self._in_features = weight.shape
        missing = -self.out_features % BLOCK
        self._num_blocks = (self.out_features + missing) // BLOCK
        numbers = F.pad(rounded.numbers.to(torch.int16) + 128, (0, 0, 0, missing)).to(torch.uint8)
        blocks = numbers.view(self._num_blocks, BLOCK, -1, 4)
        self.numbers = blocks.transpose(1, 2).contiguous()
        self.scales = F.pad(rounded.scales[:, 0], (0, missing))
        self._bias = bias
        self._team = weight.numel() >= _TEAM_SIZE
        self._kernel = Kernel(int8_linear, "11qd", weight.dtype)

    def __call__(self, x: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        return self._run(x, out, Input.PLAIN, add=add)

    def of_normed(self, x: Tensor, norm: Tensor, eps: float, out: Tensor) -> Tensor:
        """Multiply the RMS norm of x [rows, in], times `norm` [in]."""
        return self._run(x, out, Input.NORMED, norm=norm, eps=eps)

    def of_gated(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """Add to `out` the product of silu(gate) * up, of gate_up [rows, 2 * in]."""
        return self._run(gate_up, out, Input.GATED, add=True)

    def _run(
        self,
        x: Tensor,
        out: Tensor,
        kind: Input,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        add: bool = False,
    ) -> Tensor:
        assert out.is_contiguous()
        assert out.dtype is x.dtype
        x = x.contiguous()
        self._kernel(
            self._team,
            self._num_blocks,
            x.data_ptr(),
            0 if norm is None else norm.data_ptr(),
            self.numbers.data_ptr(),
            self.scales.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            x.numel() // x.shape[-1],
            self._in_features,
            self.out_features,
            kind,
            add,
            eps,
        )
        return out
