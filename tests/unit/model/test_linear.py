"""Packed linears say what `F.linear` says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from outrider.engine.layers.linear import PackedLinear
from outrider.engine.model.pack import prepack_linears

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.02}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 32), (5, 32), (2, 3, 32), (40, 32), (3, 30, 32), (96, 32)])
@pytest.mark.parametrize("with_bias", [False, True])
@torch.inference_mode()
def test_packed_linear_for_any_shape_equals_plain_linear(
    dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 32).to(dtype)
    bias = torch.randn(48).to(dtype) if with_bias else None
    x = torch.randn(*shape).to(dtype)
    residual = torch.randn(*shape[:-1], 48).to(dtype)
    packed = PackedLinear(weight, bias)
    close = {"atol": 6 * TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(packed(x), expected, **close)
    out = torch.empty_like(expected)
    assert packed(x, out) is out
    assert torch.equal(out, packed(x))
    torch.testing.assert_close(packed.add(x, residual.clone()), residual + expected, **close)


def test_prepack_linears_with_tied_embedding_keeps_outputs() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 8)
            self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    ids = torch.tensor([3, 7])
    with torch.inference_mode():
        expected = model.head(model.body(model.embedding(ids)))
        assert prepack_linears(model) == 2
        assert isinstance(model.head, PackedLinear)
        torch.testing.assert_close(model.head(model.body(model.embedding(ids))), expected)
