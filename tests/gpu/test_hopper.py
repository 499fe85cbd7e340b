"""The GEMM kernel for Hopper against plain torch."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models.kernels import ON_GPU, randn  # isort: skip - before what needs Triton
from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.candidates import CANDIDATES
from outrider.engine.cuda.gemm.linear import FewRowsLinear
from outrider.engine.cuda.gemm.tilings import HopperTiles, Product
from outrider.engine.cuda.llama_ops import TritonOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU or not hopper.available(), reason="needs Hopper"),
]
_TILINGS = [
    HopperTiles(128, 1),
    HopperTiles(128, 20),
    HopperTiles(128, 264, 2),
    HopperTiles(256, 1),
    HopperTiles(256, 100),
]
_INT8 = [replace(tiling, reads="int8") for tiling in _TILINGS]


def _products(x: Tensor, layer: FewRowsLinear, tiling: HopperTiles, old: Tensor) -> list[Tensor]:
    """Compute plain, gated and normed products, and one added to `old`."""
    norm = randn(x.shape[1], dtype=x.dtype, seed=2)
    layer.choices = dict.fromkeys(CANDIDATES, tiling)
    ops = TritonOps()
    return [
        layer(x, x.new_empty(len(x), layer.out_features)),
        ops.norm_gated(x, norm, 1e-5, layer),
        ops.norm_linear(x, norm, 1e-5, layer),
        layer.add(x, old.clone()),
    ]


def _expected(x: Tensor, weight: Tensor, old: Tensor) -> list[Tensor]:
    norm = randn(x.shape[1], dtype=x.dtype, seed=2)
    normed = F.rms_norm(x, norm.shape, norm, 1e-5).float()
    plain, of_normed = x.float() @ weight.t(), normed @ weight.t()
    gate, up = (half.bfloat16().float() for half in of_normed.chunk(2, 1))
    return [plain, F.silu(gate).bfloat16() * up, of_normed, plain + old]


@pytest.mark.parametrize("rows", [2, 3, 8, 21, 40, 64, 96, 157])
@pytest.mark.parametrize("tiling", [*_TILINGS, *_INT8], ids=str)
@torch.inference_mode()
def test_hopper_tiles_of_any_rows_equal_torch(tiling: HopperTiles, rows: int) -> None:
    if tiling.reads == "int8" and rows > 96:
        pytest.skip("is never tried")
    for outputs, inner in ((256, 128), (768, 1152), (2048, 2048)):
        layer = FewRowsLinear(randn(outputs, inner, dtype=torch.bfloat16) * inner**-0.5)
        weight = layer.weight.float()
        if tiling.reads == "int8":
            layer.quantize()
            assert layer._int8 is not None
            weight = layer._int8.dequantise()
        assert tiling.takes(outputs, inner)
        x = randn(rows, inner, dtype=torch.bfloat16, seed=1)
        old = randn(rows, outputs, dtype=torch.bfloat16, seed=3)
        first, second = (_products(x, layer, tiling, old) for _ in range(2))
        for mine, again, right in zip(first, second, _expected(x, weight, old), strict=True):
            assert torch.equal(mine, again)  # whatever order programs end in
            error = (mine.float() - right.float()).abs().max()
            assert error <= 0.016 * right.float().abs().max()  # two roundings to bfloat16


@torch.inference_mode()
def test_hopper_tiles_with_missing_rows_write_only_existing_ones() -> None:
    layer = FewRowsLinear(randn(512, 1024, dtype=torch.bfloat16))
    x = randn(16, 1024, dtype=torch.bfloat16, seed=1)
    for tiling in _TILINGS:
        out = torch.full((24, 512), 7.0, dtype=torch.bfloat16, device=x.device)
        tiling(Product(x, layer.weight, layer.weight, out[:16]))
        assert (out[16:] == 7.0).all()
        fewer = torch.full_like(out, 7.0)
        tiling(Product(x[:11], layer.weight, layer.weight, fewer[:11]))
        assert torch.equal(fewer[:11], out[:11])
        assert (fewer[11:] == 7.0).all()


@torch.inference_mode()
def test_hopper_tiles_in_captured_chain_equal_torch() -> None:
    layers = [FewRowsLinear(randn(1024, 1024, dtype=torch.bfloat16, seed=n) / 32) for n in range(6)]
    x = randn(40, 1024, dtype=torch.bfloat16, seed=9)
    states = x.new_zeros(len(layers) + 1, *x.shape)

    def chain() -> None:
        for layer, tiling, (before, after) in zip(
            layers, itertools.cycle(_TILINGS), itertools.pairwise(states), strict=False
        ):
            layer.choices = {40: tiling}
            layer(before, after)

    chain()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for seed in range(3):
        states[0].copy_(randn(40, 1024, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        expected = states[0].float()
        for layer in layers:
            expected = (expected @ layer.weight.float().t()).bfloat16().float()
        error = (states[-1].float() - expected).abs().max()
        assert error <= 0.02 * expected.abs().max()
