"""Products with weights of 8 bits, and a target of such weights, against plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models.kernels import DEVICE, ON_GPU, randn  # isort: skip - before what needs Triton
from outrider.engine.batch import RowSlice, pack
from outrider.engine.cuda.gemm import hopper
from outrider.engine.cuda.gemm.candidates import CANDIDATES, MANY_ROWS, small_candidates
from outrider.engine.cuda.gemm.hopper import Reads
from outrider.engine.cuda.gemm.linear import FewRowsLinear, Kind
from outrider.engine.cuda.gemm.quantized import QuantizedLinear
from outrider.engine.cuda.gemm.tilings import (
    Gemv,
    HopperTiles,
    Product,
    Small,
    Tiling,
    split_inputs,
)
from outrider.engine.cuda.llama_ops import TritonOps
from outrider.engine.kv_cache import fp8
from outrider.engine.layers.linear import PackedLinear
from outrider.engine.layers.ops import Use
from outrider.engine.layers.quantized import QuantizedWeight
from outrider.engine.model.loader import ModelOptions, load_model
from outrider.engine.model.pack import pack_output_layer
from outrider.models.resolve import resolve_model

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a device with float8")
needs_hopper = pytest.mark.skipif(not ON_GPU or not hopper.available(), reason="needs Hopper")
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def _weight(outputs: int, inner: int, reads: Reads, rows: int = 0) -> QuantizedWeight:
    """Make a weight with a scale per row, or per block of so many rows and 128 columns."""
    weight = randn(outputs, inner, dtype=torch.bfloat16) * inner**-0.5
    if not rows:
        return QuantizedWeight.of(weight, _DTYPES[reads], rounds_inputs=True)
    scales = (1 + randn(outputs // rows, inner // 128, dtype=torch.float32, seed=7).abs()) * 0.01
    numbers = (randn(outputs, inner, dtype=torch.float32, seed=8) * 40).clamp(-127, 127)
    return QuantizedWeight(numbers.to(_DTYPES[reads]), scales, (rows, 128))


def _results(layer: QuantizedLinear, x: Tensor, old: Tensor, tiling: Tiling | None) -> list[Tensor]:
    """Compute plain, gated and normed products, and one added to `old`."""
    norm = randn(x.shape[1], dtype=x.dtype, seed=2)
    layer.choices = {} if tiling is None else dict.fromkeys((*CANDIDATES, *MANY_ROWS), tiling)
    ops = TritonOps()
    return [
        layer(x, x.new_empty(len(x), layer.out_features)),
        ops.norm_gated(x, norm, 1e-5, layer),
        ops.norm_linear(x, norm, 1e-5, layer),
        layer.add(x, old.clone()),
    ]


def _normed(x: Tensor, norm: Tensor) -> Tensor:
    """Norm rows and round where models of `transformers` do: `F.rms_norm` rounds once.

    A bit of bfloat16 in the input may be one of float8, which is larger than what tests allow.
    """
    wide = x.float()
    wide *= torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5)
    return wide.to(x.dtype) * norm


def _expected(x: Tensor, weight: Tensor, old: Tensor, *, rounds: bool) -> list[Tensor]:
    """In float32, with inputs rounded to float8 if asked."""
    norm = randn(x.shape[1], dtype=x.dtype, seed=2)
    inputs = [x, _normed(x, norm)]
    wide = [fp8.dequantise(*fp8.quantise(each), torch.float32) for each in inputs]
    plain, of_normed = (
        (mine if rounds else each.float()) @ weight.t()
        for mine, each in zip(wide, inputs, strict=True)
    )
    gate, up = (half.bfloat16().float() for half in of_normed.chunk(2, 1))
    return [plain, F.silu(gate).bfloat16() * up, of_normed, plain + old]


def _check(
    weight: QuantizedWeight,
    rows: int,
    tiling: Tiling | None,
    tolerance: float = 0.016,
    *,
    rounds: bool = False,
) -> None:
    layer = QuantizedLinear(weight, None)
    x = randn(rows, weight.shape[1], dtype=torch.bfloat16, seed=1)
    old = randn(rows, weight.shape[0], dtype=torch.bfloat16, seed=3)
    assert tiling is None or tiling.takes(*weight.shape)
    results = _results(layer, x, old, tiling)
    for mine, right in zip(
        results, _expected(x, weight.dequantise(), old, rounds=rounds), strict=True
    ):
        error = (mine.float() - right.float()).abs().max()
        assert error <= tolerance * right.float().abs().max()


@pytest.mark.parametrize("rows", [0, 1, 128])
@pytest.mark.parametrize("reads", ["int8", "fp8"])
@torch.inference_mode()
def test_weight_by_kernel_equals_dequantised(reads: Reads, rows: int) -> None:
    weight = _weight(256, 384, reads, rows)
    made = QuantizedLinear(weight, None).weight
    wanted = weight.dequantise(torch.bfloat16)
    if ON_GPU:
        assert torch.equal(made, wanted)
    torch.testing.assert_close(made, wanted, rtol=2**-7, atol=0.0)  # the interpreter cuts bits off


@torch.inference_mode()
def test_inputs_of_16_bits_are_stored_in_the_order_of_the_kernel() -> None:
    x = randn(3, 384, dtype=torch.bfloat16, seed=1)
    weight = torch.empty(1, 384, dtype=torch.float8_e4m3fn, device=DEVICE)
    stored, units = split_inputs(Product(x, weight, weight, x), torch.float16)
    # A thread has 32 adjacent columns of 128: of each of eight steps two pairs, 8 columns apart.
    wanted = x.view(3, 3, 4, 8, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(3, 384)
    assert torch.equal(stored[0].float() * units[:, None], wanted.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@torch.inference_mode()
def test_gated_inputs_are_rounded_as_if_computed_before(dtype: torch.dtype) -> None:
    gate_up = randn(5, 2 * 176, dtype=torch.bfloat16, seed=1)
    weight = torch.empty(1, 176, dtype=dtype, device=DEVICE)
    before = Product(TritonOps().silu_mul(gate_up), weight, weight, weight)
    at_once = Product(gate_up, weight, weight, weight, silu=True)
    for planes in (1, 2) if dtype is torch.int8 else (1,):
        (mine, units), (wanted, old) = (split_inputs(p, dtype, planes) for p in (at_once, before))
        assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(units, old)


@pytest.mark.parametrize("reads", ["int8", "fp8"])
def test_one_row_of_float8_has_no_gemv_on_hopper(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "available", lambda: True)
    tilings = small_candidates(1, reads, by_row=True, rounds_inputs=True)
    kinds = {type(tiling) for tiling in tilings}
    assert kinds == ({Gemv, HopperTiles} if reads == "int8" else {HopperTiles})


@needs_gpu
@pytest.mark.parametrize("rows", [1, 2])
@torch.inference_mode()
def test_gemv_of_float8_equals_dequantised(rows: int) -> None:
    for tiling in (Gemv(64, 8, "fp8"), Gemv(128, 4, "fp8")):
        _check(_weight(512, 1024, "fp8"), rows, tiling)
        _check(_weight(512, 1152, "fp8"), rows, tiling)  # no power of two


@needs_hopper
@pytest.mark.parametrize("scale_rows", [0, 1, 128])
@torch.inference_mode()
def test_hopper_tiles_of_int8_equal_dequantised(scale_rows: int) -> None:
    reads: Reads = "int8"
    weight = _weight(768, 1152, reads, scale_rows)
    layer = QuantizedLinear(weight, None)
    cases = (
        (1, HopperTiles(128, 100, reads=reads)),
        (33, HopperTiles(256, 1, reads=reads)),
        (96, HopperTiles(128, 264, reads=reads)),
        (16, HopperTiles(128, 264, 2, reads)),
        (128, HopperTiles(128, 100, reads=reads)),
        (201, HopperTiles(128, 100, reads=reads)),  # in two parts
    )
    kinds = ((False, False), (True, False), (False, True))
    variants = [
        layer.variant(tiling, rows, gated=gated, add=add)
        for (rows, tiling), (gated, add) in itertools.product(cases, kinds)
    ]
    hopper.load(variants, layer.device)  # in parallel
    for rows, tiling in cases:
        _check(weight, rows, tiling)


@needs_hopper
@pytest.mark.parametrize("scale_rows", [0, 1, 128])
@pytest.mark.parametrize("rounds", [False, True])
@torch.inference_mode()
def test_hopper_tiles_of_float8_equal_dequantised(scale_rows: int, rounds: bool) -> None:
    weight = _weight(768, 1152, "fp8", scale_rows)
    for rows, tiling in (
        (2, HopperTiles(128, 100, reads="fp8", rounds=rounds)),
        (33, HopperTiles(256, 1, reads="fp8", rounds=rounds)),
        (96, HopperTiles(128, 264, reads="fp8", rounds=rounds)),
        (16, HopperTiles(128, 264, 2, reads="fp8", rounds=rounds)),
        (128, HopperTiles(256, 100, reads="fp8", rounds=rounds)),
        (128, HopperTiles(128, 264, 2, "fp8", rounds=rounds)),
        (157, HopperTiles(128, 100, reads="fp8", rounds=rounds)),
        (201, HopperTiles(128, 100, reads="fp8", rounds=rounds)),
    ):
        _check(weight, rows, tiling, rounds=rounds)


@needs_gpu
def test_output_layer_without_hopper_is_dequantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "available", lambda: False)
    weight = _weight(256, 384, "int8")
    layer = pack_output_layer(weight, None, torch.bfloat16)
    assert type(layer) is FewRowsLinear
    assert torch.equal(layer.weight, weight.dequantise(torch.bfloat16))


@needs_gpu
@torch.inference_mode()
def test_mlp_in_fewer_launches_equals_its_parts() -> None:
    gate_up, down = (_weight(n, k, "fp8") for n, k in ((2048, 512), (512, 1024)))
    layers = [QuantizedLinear(each, None) for each in (gate_up, down)]
    for layer in layers:
        layer.choices = dict.fromkeys((*CANDIDATES, *MANY_ROWS), Small("fp8"))
    x, norm = (randn(n, 512, dtype=torch.bfloat16, seed=n) for n in (300, 1))
    ops = TritonOps()
    wanted = layers[1].add(ops.norm_gated(x, norm[0], 1e-5, layers[0]), x.clone())
    assert torch.equal(ops.mlp(x.clone(), norm[0], 1e-5, *layers), wanted)


@needs_gpu
@torch.inference_mode()
def test_library_products_of_float8_equal_those_of_rounded_inputs() -> None:
    for rows in (2, 40, 97, 160, 700):
        _check(_weight(768, 1024, "fp8"), rows, Small("fp8"), rounds=True)
        _check(_weight(768, 1024, "fp8"), rows, None)


@needs_gpu
@torch.inference_mode()
def test_library_products_of_int8_lose_no_more_than_their_bits() -> None:
    for rows in (97, 160, 700):
        _check(_weight(768, 1024, "int8"), rows, Small("int8"), 0.03)
        _check(_weight(768, 1024, "int8"), rows, Small("int8", planes=2))
        _check(_weight(768, 1024, "int8"), rows, None)


@needs_gpu
@torch.inference_mode()
def test_bias_is_added_with_and_without_a_tiling() -> None:
    weight = _weight(256, 512, "fp8")
    bias = randn(256, dtype=torch.bfloat16, seed=5)
    layer, bare = QuantizedLinear(weight, bias), QuantizedLinear(weight, None)
    x, old = (randn(1, n, dtype=torch.bfloat16, seed=n) for n in (512, 256))
    for choices in ({}, {1: Gemv(64, 8, "fp8")}):
        layer.choices = bare.choices = choices  # type: ignore[assignment]
        # The bias is added before or after a rounding to bfloat16.
        tolerance = {"rtol": 2**-8, "atol": 2**-7}
        torch.testing.assert_close(layer(x), bare(x) + bias, **tolerance)
        torch.testing.assert_close(layer.add(x, old.clone()), bare.add(x, old + bias), **tolerance)


@needs_hopper
@pytest.mark.parametrize(("reads", "scale_rows"), [("fp8", 128), ("int8", 0)])
@torch.inference_mode()
def test_tune_chooses_right_kernels_for_8_bits(
    reads: Reads, scale_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.cuda.gemm.kept_tilings.load", lambda *_: None)
    norm = randn(1024, dtype=torch.bfloat16)
    up, down = _weight(4096, 1024, reads, scale_rows), _weight(1024, 2048, reads, scale_rows)
    layers = [QuantizedLinear(up, None), QuantizedLinear(down, None)]
    uses = [Use(layers[0], norm, gated=True), Use(layers[1])]
    assert [str(Kind.of(use, each)) for use, each in zip(uses, layers, strict=True)]
    ops = TritonOps()
    inputs = [randn(n, 1024, dtype=torch.bfloat16, seed=n) for n in (1, 5, 40, 200)]

    def chain(x: Tensor) -> Tensor:
        return layers[1].add(ops.norm_gated(x, norm, 1e-5, layers[0]), x.clone())

    before = [chain(x) for x in inputs]
    ops.tune(uses)
    for x, wanted in zip(inputs, before, strict=True):
        assert (chain(x) - wanted).abs().max() <= 0.06 * wanted.abs().max()


class _RoundsInputs(PackedLinear):
    """Multiplies float8 with inputs that are rounded to float8, as a GPU does for many rows."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight.dequantise(dtype), bias)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return super().forward(fp8.dequantise(*fp8.quantise(x), x.dtype), out)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return super().add(fp8.dequantise(*fp8.quantise(x), x.dtype), residual)


@needs_gpu
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_embedded_target_of_8_bits_equals_itself_on_a_cpu(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a step is that of bfloat16, .007 by emulation. A prompt's is that of rounding.

    Rounding magnifies bfloat16's error to its own size. So logits of rounded inputs are not
    compared with each other, but by their distance from those of exact inputs.
    """
    tokens = [(7 * i + 3) % 8000 for i in range(300)]
    logits = []
    cpu = torch.device("cpu")
    for dtype, device, rounds in (
        (torch.bfloat16, DEVICE, False),
        (torch.float32, cpu, False),
        (torch.float32, cpu, True),
    ):
        if rounds and quantization == "fp8":
            monkeypatch.setattr("outrider.engine.model.llama.pack_quantized", _RoundsInputs)
        options = ModelOptions(
            page_size=64,
            num_pages=8,
            quantization=quantization,
            attention_backend=None if device.type == "cuda" else "sdpa",
            self_test=not rounds,
        )
        folder = resolve_model("embedded", "target")
        model = load_model(folder, options, dtype=dtype, device=device)  # with its self-test
        of_lengths = []
        for length in (8, 300):
            batch = pack([RowSlice(tokens[:length], 0, list(range(8)), length)], 64, device)
            of_lengths.append(model.forward(batch).cpu())
        logits.append(of_lengths)
    for found, wanted, rounded, length in zip(*logits, (8, 300), strict=True):
        size = 0.02 * wanted.norm()
        if length > 8:
            size += 1.2 * (rounded - wanted).norm()
        assert (found - wanted).norm() <= size
