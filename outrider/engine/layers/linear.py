"""Linear layers with a fixed weight, packed once for oneDNN on a CPU.

`F.linear` is slow for the few rows of a decoding step. In float32 it calls a library that is slow
at them, and in bfloat16 it packs the weight again at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PACK_ROWS = 8  # rows of input that the packed layout is made for


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN can hold packed weights of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Linear(Protocol):
    """A linear layer with a fixed weight."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map x [..., in] to [..., out], in `out` if it is given."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)`; `residual` may be overwritten."""


class Int8Product(Protocol):
    """A product with a weight and inputs that are rounded to int8."""

    def __call__(self, x: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        """Write the product of x [..., in] to `out` [..., out], or add it, and return `out`."""


class PackedLinear(nn.Module):
    """`F.linear` with a fixed weight [out, in], which is copied and packed where possible."""

    int8: Int8Product | None = None
    """This multiplies in place of the weight, which is then given up."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = can_prepack(weight.dtype, weight.device)
        self.bias = None if bias is None else bias.detach()
        weight = weight.detach().contiguous()
        with torch.inference_mode():
            self._weight = (
                torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
                if self._packed
                else weight
            )

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map x [..., in] to [..., out], in `out` if it is given."""
        if self.int8 is not None:
            if out is None:
                out = x.new_empty(*x.shape[:-1], self.out_features)
            return self.int8(x, out)
        if self._packed:
            y = _pad_rows(self._multiply, x)
            return y if out is None else out.copy_(y)
        if out is None:
            return F.linear(x, self._weight, self.bias)
        flat, into = x.view(-1, self.in_features), out.view(-1, self.out_features)
        if self.bias is None:
            torch.mm(flat, self._weight.t(), out=into)
        else:
            torch.addmm(self.bias, flat, self._weight.t(), out=into)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + self(x)`; `residual` may be overwritten."""
        if self.int8 is not None:
            return self.int8(x, residual, add=True)
        if self._packed:
            return _pad_rows(self._multiply_add, x, residual)
        if self.bias is not None:
            residual += self.bias
        residual.view(-1, self.out_features).addmm_(x.view(-1, self.in_features), self._weight.t())
        return residual

    def round_to_int8(self, make: Callable[[Tensor, Tensor | None], Int8Product]) -> None:
        """Multiply with what `make` returns for weight [out, in] and bias from now on."""
        weight = self.dense_weight()
        self.int8, self._weight = make(weight, self.bias), weight.new_empty(0)

    def dense_weight(self) -> Tensor:
        """Return the weight [out, in] as it was given; it must not be rounded yet."""
        return self._weight.to_dense() if self._packed else self._weight

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return y

    def _multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._weight, self.bias, "add"
        )
        return y


def _pad_rows(product: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Return `product` of tensors [..., any], computed with at most an eighth more rows.

    oneDNN compiles and keeps a kernel for every number of rows, and prompts have any number. So
    the rows are padded to one of eight numbers per power of two.
    """
    count = rows[0].numel() // rows[0].shape[-1]
    step = 1 << max(0, (count - 1).bit_length() - 4)
    missing = -count % step
    if not missing:
        return product(*rows)
    padded = product(*[F.pad(each.flatten(0, -2), (0, 0, 0, missing)) for each in rows])
    return padded[:count].view(*rows[0].shape[:-1], -1)
