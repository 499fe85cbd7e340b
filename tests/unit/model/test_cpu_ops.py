"""The compiled operations of a Llama step against the plain ones, rounding included."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from numba import cfunc, float32, types
from torch import Tensor

from outrider.engine.cpu import attend, int8, scalars
from outrider.engine.cpu.ops import NumbaOps
from outrider.engine.cpu.team import Recording
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.layers.linear import PackedLinear
from outrider.engine.layers.ops import TorchOps, Use

HIDDEN, HEADS, KV_HEADS, DIM = 96, 6, 2, 16
CPU = torch.device("cpu")
PLAIN = TorchOps()
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
MANY = 700  # tokens enough for a team of threads

int8_only = pytest.mark.skipif(not int8.available(), reason="needs AVX-512 VNNI")

# A sum in another order may fall on the other side of a rounding in one of thousands.
_TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 2e-6, torch.float64: 1e-12}


def _assert_same(ours: Tensor, plain: Tensor) -> None:
    tolerance = _TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)
    if ours.dtype is torch.bfloat16:
        assert (ours != plain).float().mean() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, MANY])
def test_rms_norm_compiled_equals_plain(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    before = x.clone()
    _assert_same(NumbaOps(dtype).rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, MANY])
def test_silu_mul_compiled_equals_plain(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    gate_up = 6 * torch.randn(tokens, 2 * HIDDEN, dtype=dtype)
    gate_up[0, :4] = torch.tensor([-200, 200, 0, -90], dtype=dtype)
    _assert_same(NumbaOps(dtype).silu_mul(gate_up), PLAIN.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, MANY])
def test_norm_rotate_and_store_compiled_equal_plain(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    weight = torch.randn(HEADS + KV_HEADS, DIM, dtype=dtype)
    angle = 7 * torch.rand(tokens, DIM // 2)
    cos, sin = angle.cos(), angle.sin()
    rope = torch.stack((cos, cos, -sin, sin), dim=1).view(tokens, 2, 2, -1).to(dtype)
    slots = torch.randperm(MANY)[:tokens]
    results = []
    for ops in (NumbaOps(dtype), PLAIN):
        pool = KVPools(MANY // 4, 4, dtype, CPU).allocate(0, KV_HEADS, DIM, DIM)
        mine = qkv.clone()
        ops.qk_norm_(mine, weight, 1e-6)
        query = ops.rotate_and_store(mine, rope, slots, pool)
        assert query.shape == (tokens, KV_HEADS, HEADS // KV_HEADS, DIM)
        results.append((query, pool.keys, pool.values))
    for ours, plain in zip(*results, strict=True):
        _assert_same(ours, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, MANY])
def test_store_context_compiled_equals_plain(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    layers = 3
    keys_values = torch.randn(tokens, 2 * layers * KV_HEADS * DIM, dtype=dtype)
    rope = torch.randn(tokens, 2, 2, DIM // 2).to(dtype)
    slots = torch.randperm(MANY)[:tokens]
    results = []
    for ops in (NumbaOps(dtype), PLAIN):
        pools = KVPools(MANY // 4, 4, dtype, CPU)
        mine = [pools.allocate(i, KV_HEADS, DIM, DIM) for i in range(layers)]
        ops.store_context(keys_values.clone(), rope, slots, mine)
        results.append([each for pool in mine for each in (pool.keys, pool.values)])
    for ours, plain in zip(*results, strict=True):
        _assert_same(ours, plain)


def test_silu_mul_in_bfloat16_rounds_as_torch() -> None:
    """The products of all pairs of significands, ties among them."""
    significands = torch.arange(32, 64, 0.25)
    gate = significands.repeat_interleave(len(significands))  # silu(x) is x here
    up = -significands.repeat(len(significands)) * 2.0**-20
    assert torch.equal(gate, gate.bfloat16().float())
    gate_up = torch.cat((gate, up)).bfloat16()[None]
    assert torch.equal(NumbaOps(torch.bfloat16).silu_mul(gate_up)[0], (gate * up).bfloat16())


def test_silu_mul_of_nan_stays_nan() -> None:
    gate_up = torch.full((1, 8), float("nan"), dtype=torch.bfloat16)
    assert NumbaOps(torch.bfloat16).silu_mul(gate_up).isnan().all()


def _rounded(x: Tensor) -> Tensor:
    """Round each row to one of 255 numbers."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@int8_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 8, 19])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_rounded_to_int8_multiplies_rounded_numbers(
    dtype: torch.dtype, rows: int, biased: bool
) -> None:
    torch.manual_seed(rows)
    num_out = 70  # no multiple of a block
    weight, x = torch.randn(num_out, HIDDEN, dtype=dtype), torch.randn(rows, HIDDEN, dtype=dtype)
    residual = torch.randn(rows, num_out, dtype=dtype)
    bias = torch.randn(num_out, dtype=dtype) if biased else None
    linear = PackedLinear(weight, bias)
    before = linear(x)
    NumbaOps(dtype, int8=True).tune([Use(linear)])
    expected = _rounded(x.double()) @ _rounded(weight.double()).T
    if bias is not None:
        expected += bias.double()
    assert not torch.equal(linear(x), before)
    for ours, exact in (
        (linear(x), expected),
        (linear(x, torch.empty_like(residual)), expected),
        (linear.add(x, residual.clone()), expected + residual.double()),
    ):
        # Some numbers lie so near between two that they are rounded the other way.
        assert (ours.double() - exact).norm() / exact.norm() < 0.003
    alone = torch.cat([linear(x[i : i + 1]) for i in range(rows)])
    assert torch.equal(linear(x), alone)


@int8_only
def test_linear_rounded_to_int8_of_wide_inputs_does_not_overflow() -> None:
    """Sums of products with the unsigned numbers exceed an int32; the result does not."""
    width = 81920
    linear = PackedLinear(torch.ones(2, width), None)
    NumbaOps(torch.float32, int8=True).tune([Use(linear)])
    assert linear(torch.ones(1, width)).tolist() == [[width, width]]


@int8_only
def test_linear_rounded_to_int8_is_the_same_on_several_threads() -> None:
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(768, 512), torch.randn(768))
    NumbaOps(torch.float32, int8=True).tune([Use(linear)])
    x, before = torch.randn(19, 512), torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(linear(x))
    torch.set_num_threads(before)
    assert torch.equal(*found)


@int8_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mlp_rounded_to_int8_is_close_to_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inner = 2 * HIDDEN
    x, norm = torch.randn(5, HIDDEN, dtype=dtype), torch.rand(HIDDEN, dtype=dtype)
    gate_up = PackedLinear(torch.randn(2 * inner, HIDDEN, dtype=dtype) / 10, None)
    down = PackedLinear(torch.randn(HIDDEN, inner, dtype=dtype) / 10, None)
    plain = NumbaOps(dtype).mlp(x.clone(), norm, 1e-5, gate_up, down)
    ops = NumbaOps(dtype, int8=True)
    ops.tune([Use(gate_up, norm, gated=True), Use(down)])
    rounded = ops.mlp(x.clone(), norm, 1e-5, gate_up, down)
    error = (rounded - plain).double().norm() / (plain - x).double().norm()
    assert 0 < error < 0.03


def test_what_takes_arguments_is_compiled_again_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a file elsewhere that calls the kernels' parts."""
    seen = []
    for code in (1, 2, 1):
        monkeypatch.setattr(scalars, "_VERSION", code)
        seen.append(scalars.Arguments(float32))
    assert seen[0] == seen[2] != seen[1]


def test_kernel_calls_none_of_its_parts() -> None:
    """A call would reach other machine code in the process that compiles than in later ones."""
    kernel = cfunc(types.void(scalars.Arguments(float32)), **scalars.OPTIONS)(attend.attend)
    functions = {*re.findall(r"_ZN8outrider\w+", kernel._library.get_asm_str())}
    assert functions == {kernel.native_name.removeprefix("cfunc.")}


def test_kernel_without_writable_cache_compiles() -> None:
    """A read-only container without a home."""
    program = (
        "import logging, torch; logging.basicConfig(level=logging.INFO)\n"
        "from outrider.engine.cpu import elementwise, team\n"
        "team.Kernel(elementwise.silu_mul, '3q', torch.float32)"
    )
    nowhere = {
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
        "NUMBA_CACHE_DIR": "/proc",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Compiled silu_mul for this CPU" in done.stderr


@torch.inference_mode()
def test_recorded_kernels_run_again_over_the_same_tensors() -> None:
    ops, weight = NumbaOps(torch.float32), torch.rand(HIDDEN)
    x = torch.zeros(3, HIDDEN)
    with Recording() as recording:
        found = ops.rms_norm(ops.rms_norm(x[1:], weight, 1e-5), weight, 1e-5)
    for seed in (1, 2):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        recording.run()
        assert torch.equal(found, ops.rms_norm(ops.rms_norm(x[1:], weight, 1e-5), weight, 1e-5))


def test_recording_refuses_what_torch_computes() -> None:
    x = torch.ones(3, HIDDEN)
    with pytest.raises(AssertionError, match=r"aten\.add\.Tensor cannot be recorded"), Recording():
        x + x
    _assert_same(NumbaOps(torch.float32).rms_norm(x, x[0], 0.0), x)  # it runs at once again
