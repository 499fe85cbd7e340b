"""Linear layers with weights packed once for oneDNN, for CPU.

`F.linear` is slow here for the few rows of a decoding step: in float32 it goes to a library that
is bad at them, in bfloat16 it re-packs the weight at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PACK_ROWS = 8  # rows of input the packed layout is made for: a few rows of K + 1 tokens


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can hold packed weights of this dtype here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Linear(Protocol):
    """A linear layer with a fixed weight."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [..., in] to [..., out], in `out` if given."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)` in one pass over the output; `residual` may be overwritten."""
        ...


class PackedLinear(nn.Module):
    """`F.linear` with a fixed weight [out, in]; packed where that is possible.

    The weight is copied: the caller may drop its own.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = can_prepack(weight.dtype, weight.device)
        self._bias = None if bias is None else bias.detach()
        weight = weight.detach().contiguous()
        with torch.inference_mode():
            self._weight = (
                torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
                if self._packed
                else weight
            )

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [..., in] to [..., out], in `out` if given."""
        if self._packed:
            y = _padded(self._multiply, x)
            return y if out is None else out.copy_(y)
        if out is None:
            return F.linear(x, self._weight, self._bias)
        flat, into = x.view(-1, self.in_features), out.view(-1, self.out_features)
        if self._bias is None:
            torch.mm(flat, self._weight.t(), out=into)
        else:
            torch.addmm(self._bias, flat, self._weight.t(), out=into)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)` in one pass over the output; `residual` may be overwritten."""
        if self._packed:
            return _padded(self._multiply_add, x, residual)
        if self._bias is not None:
            residual += self._bias
        residual.view(-1, self.out_features).addmm_(x.view(-1, self.in_features), self._weight.t())
        return residual

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def _multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._weight, self._bias, "add"
        )
        return y


def _padded(product: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`product` of rows [..., any] each, made up to one of eight numbers per power of two.

    oneDNN compiles a kernel for every number of rows (1 ms, 0.7 MB), and prompts have any: over
    time that took a gigabyte. An eighth more rows at most costs less.
    """
    count = rows[0].numel() // rows[0].shape[-1]
    step = 1 << max(0, (count - 1).bit_length() - 4)
    missing = -count % step
    if not missing:
        return product(*rows)
    made_up = product(*[F.pad(each.flatten(0, -2), (0, 0, 0, missing)) for each in rows])
    return made_up[:count].view(*rows[0].shape[:-1], -1)


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest layer for a fixed weight [out, in], which it copies."""
    if weight.device.type == "cpu" and weight.dtype is torch.bfloat16:
        from outrider.engine.cpu.linear import CompiledLinear, fits  # imports Numba

        if fits(weight):
            return CompiledLinear(weight, bias)
    if weight.device.type == "cuda" and weight.dtype is torch.bfloat16:
        from outrider.engine.cuda.gemm import linear as products  # imports Triton

        if products.fits(weight, bias):
            return products.FewRowsLinear(weight)
    return PackedLinear(weight, bias)


def prepack_linears(model: nn.Module) -> int:
    """Replace every plain `nn.Linear` of a loaded model in place; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_prepack(child.weight.dtype, child.weight.device):
                setattr(parent, name, pack_linear(child.weight, child.bias))
                count += 1
    return count
