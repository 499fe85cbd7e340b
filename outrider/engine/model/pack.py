"""Choose the fastest linear layer for a weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.engine.layers.linear import Linear, PackedLinear, can_prepack
from outrider.engine.layers.quantized import QuantizedWeight


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """Return the layer for a fixed 8-bit weight [out, in], which it takes over.

    In float32 and float64 it multiplies with the dequantised weight, kept in memory.
    """
    if dtype is torch.bfloat16 and weight.numbers.is_cuda:
        from outrider.engine.cuda.gemm.quantized import QuantizedLinear  # imports Triton

        return QuantizedLinear(weight, bias)
    return PackedLinear(weight.dequantise(dtype), bias)


def pack_output_layer(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """Return the layer for an output layer [vocab, in] of 8 bits, which every step multiplies.

    Where no kernel reads it for any few rows, it is dequantised once and not at each step.
    """
    if weight.numbers.is_cuda:
        from outrider.engine.cuda.gemm import hopper  # imports Triton

        if not hopper.available():
            return pack_linear(weight.dequantise(dtype), bias)
    return pack_quantized(weight, bias, dtype)


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the fastest layer for a fixed weight [out, in], which it copies."""
    if weight.device.type == "cuda" and weight.dtype is torch.bfloat16:
        from outrider.engine.cuda.gemm import linear as gemm  # imports Triton

        if gemm.fits(weight, bias):
            return gemm.FewRowsLinear(weight)
    return PackedLinear(weight, bias)


def prepack_linears(model: nn.Module) -> int:
    """Pack every plain `nn.Linear` of a model in place where oneDNN can, and count them."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_prepack(child.weight.dtype, child.weight.device):
                setattr(parent, name, pack_linear(child.weight, child.bias))
                count += 1
    return count
