"""Keys and values as float8 (e4m3), each vector times a scale.

The scale of a token's head is the smallest power of two with which the vector's largest number
fits, as in the formats of the Open Compute Project (2023, "OCP Microscaling Formats (MX)
Specification"). Multiplying by it is exact, so that only the numbers' digits are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = torch.float8_e4m3fn
SCALES = torch.bfloat16
# The largest number is 1.75 * 2**8. Adding this to the bits of a float32 x carries into the
# exponent if x is more than 1.75 times a power of two.
_CARRY = 0x1FFFFF


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors x [..., dim] to NUMBERS [..., dim] times SCALES [...]."""
    wide = x.float()
    largest = wide.abs().amax(-1).view(torch.int32)
    exponents = (((largest + _CARRY) >> 23) - 8).clamp_min_(1)  # of the least normal number
    scales, inverse = ((bits << 23).view(torch.float32) for bits in (exponents, 254 - exponents))
    return (wide * inverse[..., None]).to(NUMBERS), scales.to(SCALES)


def dequantise(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors [..., dim] of what `quantise` returned."""
    return (numbers.float() * scales.float()[..., None]).to(dtype)


def as_bytes(numbers: Tensor) -> Tensor:
    """View NUMBERS as bytes, which torch can index on every device."""
    return numbers.view(torch.uint8)
