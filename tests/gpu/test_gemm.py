"""The CUDA products of few rows against plain torch."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.models.kernels import ON_GPU, close, randn  # isort: skip - before what needs Triton
from outrider.engine.cuda import compile
from outrider.engine.cuda.gemm import hopper, kept_tilings
from outrider.engine.cuda.gemm.autotune import Chain, _compile, _variants, timed
from outrider.engine.cuda.gemm.candidates import CANDIDATES, candidates
from outrider.engine.cuda.gemm.linear import FewRowsLinear, Kind
from outrider.engine.cuda.gemm.tilings import Gemv, HopperTiles, Tiling
from outrider.engine.cuda.llama_ops import TritonOps
from outrider.engine.graphs.capture import CudaGraphs
from outrider.engine.layers.ops import TorchOps, Use
from outrider.engine.layers.quantized import QuantizedWeight

pytestmark = pytest.mark.gpu


def _linear(weight: Tensor, *, int8: bool) -> FewRowsLinear:
    """Make a layer of `weight`, or of the weight that quantizing it leaves."""
    if not int8:
        return FewRowsLinear(weight)
    quantized = QuantizedWeight.of(weight, torch.int8, rounds_inputs=False)
    assert (quantized.numbers.abs().amax(1) == 127).all()
    rest = quantized.dequantise()
    assert (rest - weight.float()).abs().amax() <= 0.51 * quantized.scales.amax()
    layer = FewRowsLinear(rest.to(weight.dtype))
    layer.quantize()
    return layer


@pytest.mark.parametrize("inner", [8, 296])  # not a power of two
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "tiling", [Gemv(32, 1), Gemv(32, 1, "int8"), Gemv(32, 1, "int8", apart=True)], ids=str
)
def test_gemv_with_few_rows_equals_torch(
    tiling: Gemv, rows: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.layers.linear.can_prepack", lambda *_: False)  # on CPU
    dtype = torch.bfloat16
    weight = (randn(128, inner, dtype=dtype) * inner**-0.5).to(dtype)
    layer = _linear(weight, int8=tiling.reads == "int8")
    x, norm = randn(rows, inner, dtype=dtype, seed=1), randn(inner, dtype=dtype, seed=2)
    plain, ours = TorchOps(), TritonOps()
    residual = randn(rows, 128, dtype=dtype, seed=3)
    expected = (
        plain.norm_linear(x, norm, 1e-5, layer),
        plain.norm_gated(x, norm, 1e-5, layer),
        layer.add(x, residual.clone()),
    )
    assert tiling.takes(128, inner)
    monkeypatch.setattr(layer, "choice", lambda _: tiling)
    out = torch.empty_like(residual)
    actual = (
        ours.norm_linear(x, norm, 1e-5, layer, out),
        ours.norm_gated(x, norm, 1e-5, layer),
        layer.add(x, residual),
    )
    assert actual[0] is out
    assert actual[2] is residual
    again = torch.empty_like(residual)
    assert layer(x, again) is again
    assert torch.equal(layer(x), again)
    close(again, x @ layer.weight.t(), dtype, size=4.0)
    for mine, theirs in zip(actual, expected, strict=True):
        close(mine, theirs, dtype, size=4.0)


def test_chain_with_wrong_and_failing_tilings_chooses_fastest_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.engine.layers.linear.can_prepack", lambda *_: False)  # on CPU
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    layers = [FewRowsLinear(randn(n, 256, dtype=dtype, seed=n) / 16) for n in (512, 256, 256)]
    uses = [Use(layers[0], randn(256, dtype=dtype), True), Use(layers[1]), Use(layers[2])]
    gated, added = Kind.of(uses[0], layers[0]), Kind.of(uses[1], layers[1])
    layers[2].choices = layers[1].choices  # of one kind
    fast, faster, unfit = Gemv(64, 2), Gemv(32, 1), HopperTiles(384, 1)
    fails, wrong, uncaptured = Gemv(64, 1), Gemv(128, 2), Gemv(32, 2)
    us: dict[Tiling | None, float] = {
        None: 10.0,
        fast: 7.0,
        faster: 5.0,
        unfit: 1.0,
        fails: 1.0,
        wrong: 1.0,
    }

    def times(*_: object) -> float:
        if uncaptured in (layer.choices.get(2) for layer in layers):
            raise RuntimeError
        return us[layers[0].choices.get(2)] + us[layers[1].choices.get(2)]

    def run(use: Use, x: Tensor, out: Tensor) -> Tensor:
        chosen = layers[uses.index(use)].choices.get(2)
        if chosen is fails:
            raise RuntimeError
        y = TritonOps().product(use, x, out)
        return y + 1 if chosen is wrong else y

    monkeypatch.setattr("outrider.engine.cuda.gemm.autotune.graph_us", times)
    tilings = (fails, fast, wrong, uncaptured, faster, unfit)
    monkeypatch.setattr(FewRowsLinear, "candidates", lambda *_: tilings)
    chain = Chain(list(zip(uses, layers, strict=True)), 2, run)
    assert list(chain._first) == [gated, added]  # the largest first
    assert chain.compare(added, tilings) == {None: 20.0, fast: 17.0, faster: 15.0}
    assert not layers[1].choices
    said = chain.choose()
    assert layers[0].choices == layers[1].choices == {2: faster}
    assert said.startswith("10 us, all by cuBLAS 20: gated 512x256 by Gemv")
    us[fast] = us[faster] = 9.99  # is noise
    chain.choose()
    assert layers[0].choices == layers[1].choices == {}


@pytest.mark.parametrize("int8", [False, True])
def test_candidates_without_hopper_are_gemv_for_one_or_two_rows(
    monkeypatch: pytest.MonkeyPatch, int8: bool
) -> None:
    monkeypatch.setattr(hopper, "available", lambda: False)
    found = {rows: candidates(rows, int8=int8) for rows in CANDIDATES}
    assert [rows for rows, tilings in found.items() if tilings] == [1, 2]
    tilings = found[1] + found[2]
    assert all(isinstance(tiling, Gemv) for tiling in tilings)
    assert {tiling.reads for tiling in tilings} == {"bf16", *(("int8",) if int8 else ())}


def test_candidates_with_hopper_read_int8_up_to_its_most_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper, "available", lambda: True)
    for rows in CANDIDATES:
        plain, quantized = candidates(rows, int8=False), candidates(rows, int8=True)
        assert {tiling.reads for tiling in plain} == {"bf16"}
        assert any(isinstance(tiling, HopperTiles) for tiling in plain) == (rows > 1)
        kinds = {1: {"bf16", "int8"}, 128: {"bf16"}, 160: {"bf16"}}.get(rows, {"int8"})
        assert {tiling.reads for tiling in quantized} == kinds
        assert any(isinstance(tiling, Gemv) for tiling in quantized) == (rows <= 2)


@pytest.mark.parametrize(
    ("tiling", "outputs", "inner", "splits"),
    [
        (HopperTiles(128, 100), 4096, 4096, 3),  # of 32 tiles
        (HopperTiles(256, 100), 4096, 4096, 6),
        (HopperTiles(128, 100), 128256, 4096, 1),  # more tiles than programs
        (HopperTiles(128, 264), 256, 8192, 8),  # a cluster has no more
        (HopperTiles(128, 264), 256, 384, 3),  # of three blocks
    ],
)
def test_hopper_tiles_split_as_far_as_programs_allow(
    tiling: HopperTiles, outputs: int, inner: int, splits: int
) -> None:
    variant = tiling.variant(33, outputs, inner, gated=False, add=True)
    assert (variant.rows, variant.splits) == (40, splits)


def test_variants_of_chosen_tilings_cover_any_number_of_rows() -> None:
    layer = FewRowsLinear(torch.empty(256, 384, device="meta"))
    layer.choices = {2: Gemv(32, 1), 16: HopperTiles(128, 2), 40: HopperTiles(256, 1)}
    variants = set(_variants([(Use(layer), layer)]))
    assert {(v.rows, v.groups) for v in variants} == {(16, 2), (40, 4)}
    assert all(v.add and not v.gated for v in variants)


def test_chain_whose_best_tilings_depend_on_each_other_finds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.engine.layers.linear.can_prepack", lambda *_: False)  # on CPU
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    gate, down = (FewRowsLinear(randn(n, 256, dtype=dtype, seed=n) / 16) for n in (512, 256))
    chain = [(Use(gate, randn(256, dtype=dtype), gated=True), gate), (Use(down), down)]
    one, other = Gemv(32, 1), Gemv(64, 1)
    us: dict[tuple[Tiling | None, Tiling | None], float] = {}

    def times(*_: object) -> float:
        return us.get((gate.choices.get(2), down.choices.get(2)), 20.0)

    monkeypatch.setattr("outrider.engine.cuda.gemm.autotune.graph_us", times)
    monkeypatch.setattr(FewRowsLinear, "candidates", lambda *_: (one, other))
    # The search from cuBLAS ends at 14, where no tiling for `down` saves time.
    us |= {(other, None): 14.0, (one, None): 14.2, (other, one): 14.1, (one, one): 10.0}
    said = Chain(chain, 2, TritonOps().product).choose()
    assert (gate.choices, down.choices) == ({2: one}, {2: one})
    assert said.startswith("10 us, all by cuBLAS 20: ")
    us[one, one] = 14.05  # the first search's is the best
    said = Chain(chain, 2, TritonOps().product).choose()
    assert (gate.choices, down.choices) == ({2: other}, {})
    assert said.startswith("14 us, all by cuBLAS 20: ")


def test_kept_tilings_are_read_for_the_same_products_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: _Device("H100", 132))
    gate, down = Kind("gated", 512, 256), Kind("added", 256, 256)
    candidates = {(gate, 1): (Gemv(64, 8), Gemv(128, 4)), (down, 1): (Gemv(64, 8),)}
    products, chosen = [gate, down], {(gate, 1): Gemv(128, 4), (down, 1): None}
    assert kept_tilings.load(products, candidates) is None
    kept_tilings.keep(products, candidates, chosen)
    assert kept_tilings.load(products, candidates) == chosen
    others = {**candidates, (down, 1): (Gemv(128, 4),)}
    assert kept_tilings.load(products, others) is None
    assert kept_tilings.load([gate, gate, down], candidates) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda: _Device("H200", 132))
        assert kept_tilings.load(products, candidates) is None
    (path,) = [each for each in tmp_path.rglob("*") if each.is_file()]
    for broken in (b"", b"\xff", b"[]", b"{}", path.read_bytes().replace(b"128", b"129")):
        path.write_bytes(broken)
        assert kept_tilings.load(products, candidates) is None
        assert "cannot be read" in caplog.text
        caplog.clear()
    kept_tilings.keep(products, candidates, chosen)
    assert kept_tilings.load(products, candidates) == chosen


def test_compile_once_runs_works_for_each_key_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: _Device("H100", 132))
    ran: list[int] = []
    monkeypatch.setattr(compile, "compile_together", lambda works: all(work() for work in works))

    def work(name: int) -> bool:
        ran.append(name)
        return name > 0

    for key in ((1, "a"), (2, "a"), (1, "a")):
        compile.compile_once([lambda key=key: work(key[0])], key)
    assert ran == [1, 2]
    for _ in range(2):
        compile.compile_once([lambda: work(0)], (0, "a"))
    assert ran[2:] == [0, 0], "what failed is compiled at the next start"


class _Device(NamedTuple):
    name: str
    multi_processor_count: int


@pytest.mark.skipif(not ON_GPU, reason="compiles for a device")
def test_compile_before_measuring_compiles_all_candidates(compiled: list[str]) -> None:
    hidden = 384  # in no other test, because all processes share compiled kernels
    norm = randn(hidden, dtype=torch.bfloat16)
    layers = [FewRowsLinear(randn(2 * n, n, dtype=torch.bfloat16)) for n in (hidden, hidden)]
    chain = timed([Use(layers[0], norm, gated=True), Use(layers[1], norm)], int8=True)
    run = TritonOps().product
    _compile(chain, run)
    assert compiled
    compiled.clear()
    for rows in CANDIDATES:
        Chain(chain, rows, run).choose()
    ours = ("gemv_kernel", "split_kernel")
    assert not [kernel for kernel in compiled if any(name in kernel for name in ours)]


@pytest.mark.skipif(not ON_GPU, reason="measures a device")
def test_tune_then_capture_changes_only_roundings() -> None:
    dtype, hidden, layers = torch.bfloat16, 2048, 8
    ops = TritonOps()
    norm = randn(hidden, dtype=dtype)
    scale = hidden**-0.5
    up = [
        FewRowsLinear(randn(4 * hidden, hidden, dtype=dtype, seed=i) * scale) for i in range(layers)
    ]
    down = [
        FewRowsLinear(randn(hidden, 2 * hidden, dtype=dtype, seed=i) * scale) for i in range(layers)
    ]

    def chain(x: Tensor) -> Tensor:
        x = x.clone()
        for first, second in zip(up, down, strict=True):
            x = second.add(ops.norm_gated(x, norm, 1e-5, first), x)
        return x

    inputs = [randn(rows, hidden, dtype=dtype, seed=rows) for rows in (1, 2, 3, 8, 16, 17)]
    expected = [chain(x) for x in inputs]
    ops.tune(
        [
            use
            for pair in zip(up, down, strict=True)
            for use in (Use(pair[0], norm, True), Use(pair[1]))
        ]
    )
    for x, wanted in zip(inputs, expected, strict=True):
        results: list[Tensor] = []
        replay = CudaGraphs()(lambda x=x, to=results: to.append(chain(x)))  # type: ignore[misc]
        replay()
        first = results[-1].clone()
        for _ in range(20):
            replay()
            assert torch.equal(results[-1], first)
        error = (results[-1] - wanted).abs().max() / wanted.abs().max()
        assert error < 0.03
