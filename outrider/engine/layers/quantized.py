"""Weights of 8 bits with float32 scales, and the modules that hold them.

int8 is symmetric; float8 is e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_AT_ONCE = 4096  # rows of a weight, to bound the memory of temporary tensors
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight as 8-bit numbers [out, in], each times the scale of its block.

    A block has `block[0]` rows and `block[1]` columns; those at the edges may be smaller.
    """

    numbers: Tensor  # int8 or float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out / block[0], in / block[1]], rounded up
    block: tuple[int, int]
    rounds_inputs: bool = False
    """Inputs may be rounded to 8 bits, too, where there are many rows."""

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype, *, rounds_inputs: bool) -> QuantizedWeight:
        """Round a weight [out, in] to the nearest, with a scale for each row.

        Every row's largest number becomes the largest of its dtype.
        """
        numbers = torch.empty_like(
            weight, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False
        )
        scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        parts = (torch.split(each, _AT_ONCE) for each in (weight.detach(), numbers, scales))
        for rows, quantized, scale in zip(*parts, strict=True):
            exact = rows.float()
            largest = exact.abs().amax(1, keepdim=True)
            scale.copy_(largest.clamp_min_(torch.finfo(torch.float32).tiny) / _LARGEST[dtype])
            exact = exact / scale
            quantized.copy_(exact.round_() if dtype is torch.int8 else exact)
        return cls(numbers, scales, (1, weight.shape[1]), rounds_inputs)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.numbers.shape

    @property
    def by_row(self) -> bool:
        """Each row has one scale."""
        return self.block == (1, self.shape[1])

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def is_finite(self) -> bool:
        """Return whether no number and no scale is NaN or infinite."""
        finite = bool(self.scales.isfinite().all())
        if self.numbers.dtype is torch.float8_e4m3fn:  # it has NaN, of two signs
            bits = torch.split(self.numbers.view(torch.uint8), _AT_ONCE)
            finite = finite and not any(bool((part & 127 == 127).any()) for part in bits)
        return finite

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [out, in], multiplied in float32 and rounded once."""
        weight = torch.empty(self.shape, dtype=dtype, device=self.numbers.device)
        rows, columns = self.block
        at_once = -(-_AT_ONCE // rows) * rows
        for start in range(0, len(weight), at_once):
            numbers = self.numbers[start : start + at_once].float()
            scales = self.scales[start // rows : (start + at_once) // rows]
            scales = scales.repeat_interleave(rows, 0)[: len(numbers)]
            scales = scales if columns >= self.shape[1] else scales.repeat_interleave(columns, 1)
            weight[start : start + at_once] = numbers.mul_(scales[:, : self.shape[1]])
        return weight

    def with_scales_by_row(self) -> QuantizedWeight:
        """Return the same weight whose blocks have one row each."""
        scales = self.scales.repeat_interleave(self.block[0], 0)[: len(self.numbers)]
        return replace(self, scales=scales, block=(1, self.block[1]))

    @classmethod
    def concatenated(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return the rows of all weights, which are of one kind, one below the other."""
        blocks = {weight.block for weight in weights}
        if len(blocks) > 1 or any(len(each.numbers) % each.block[0] for each in weights[:-1]):
            weights = [each.with_scales_by_row() for each in weights]
        numbers = torch.cat([each.numbers.view(torch.uint8) for each in weights])
        return replace(
            weights[0],
            numbers=numbers.view(weights[0].numbers.dtype),
            scales=torch.cat([each.scales for each in weights]),
        )


class QuantizedModule(nn.Module):
    """Stands in for `nn.Linear` in a model of `transformers`.

    It multiplies with the dequantised weight, in the input's dtype.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.weight: QuantizedWeight | None = weight
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        assert self.weight is not None
        return F.linear(x, self.weight.dequantise(x.dtype), self.bias)

    def take(self) -> QuantizedWeight:
        """Hand over the weight, which this module loses."""
        assert self.weight is not None
        weight, self.weight = self.weight, None
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModule:
        """Share the 8-bit numbers, which nothing changes."""
        assert self.weight is not None
        return QuantizedModule(self.weight, copy.deepcopy(self.bias, memo))
