"""The CUDA kernels of `LlamaOps` and of sampling against plain torch."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.support.models.kernels import DEVICE, DTYPES, ON_GPU, close, randn  # isort: skip - before what needs Triton
from outrider.engine.cuda.llama_ops import TritonOps
from outrider.engine.cuda.sampling import choose_and_verify
from outrider.engine.cuda.sampling import sample as sample_on_device
from outrider.engine.kv_cache.pools import PageMajorPool
from outrider.engine.layers.ops import TorchOps
from outrider.engine.sampling.noise import gumbel_noise
from outrider.engine.sampling.sample import SamplingBatch, process_logits, sample
from outrider.engine.sampling.verify import VerifyBatch
from outrider.engine.sampling.verify import choose_and_verify as torch_choose_and_verify
from outrider.params import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 4096), (5, 96)])
def test_rms_norm_in_triton_equals_torch(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, weight = randn(tokens, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    actual = TritonOps().rms_norm(x, weight, 1e-5)
    close(actual, TorchOps().rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_in_triton_equals_torch(dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * 1500, dtype=dtype)
    close(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (6, 1, 24), (3, 3, 80)])
def test_norm_rotate_and_store_in_triton_equal_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    tokens = 5
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    weight = randn(heads + kv_heads, dim, dtype=dtype, seed=1)
    rope = randn(tokens, 2, 2, dim // 2, dtype=dtype, seed=2)
    slots = torch.tensor([3, 9, 17, 0, 30], device=DEVICE)
    results = []
    for ops in (TritonOps(), TorchOps()):
        pool = PageMajorPool(4, 8, (kv_heads, dim, dim), dtype, DEVICE)
        mine = qkv.clone()
        ops.qk_norm_(mine, weight, 1e-6)
        query = ops.rotate_and_store(mine, rope, slots, pool)
        results.append((query, pool.keys, pool.values))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, dtype, size=4.0)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (6, 1, 24), (3, 3, 80)])
def test_float8_pool_holds_what_another_would_rounded(heads: int, kv_heads: int, dim: int) -> None:
    dtype, shape = torch.bfloat16, (kv_heads, dim, dim)
    qkv = randn(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv *= torch.tensor([1.0, 1e-30, 1e30, 0.0, 200.0], device=DEVICE)[:, None]
    rope = randn(5, 2, 2, dim // 2, dtype=dtype, seed=2)
    slots = torch.tensor([3, 9, 17, 0, -1], device=DEVICE)
    plain, mine, expected = (
        PageMajorPool(4, 8, shape, dtype, DEVICE, float8=float8) for float8 in (False, True, True)
    )
    queries = [
        TritonOps().rotate_and_store(qkv.clone(), rope, slots, pool) for pool in (plain, mine)
    ]
    assert torch.equal(*queries)
    written = slots[:4]
    keys, values = (each.transpose(0, 1) for each in plain.gather(written))
    expected.write(written, keys, values)
    assert mine.scales is not None
    assert expected.scales is not None
    assert torch.equal(mine.scales, expected.scales)
    for actual, wanted in ((mine.keys, expected.keys), (mine.values, expected.values)):
        assert torch.equal(actual.view(torch.uint8), wanted.view(torch.uint8))


def test_rotate_and_store_with_negative_slot_stores_nothing() -> None:
    pool = PageMajorPool(2, 4, (1, 16, 16), torch.float32, DEVICE)
    qkv, rope = randn(2, 48, dtype=torch.float32), randn(2, 2, 2, 8, dtype=torch.float32)
    TritonOps().rotate_and_store(qkv, rope, torch.tensor([-1, 2], device=DEVICE), pool)
    assert (
        pool.values.flatten(0, 1).any(dim=-1).flatten().tolist()
        == [False] * 2 + [True] + [False] * 5
    )


def _moved(batch: SamplingBatch) -> SamplingBatch:
    values: list[Any] = [getattr(batch, field.name) for field in fields(batch)]
    return SamplingBatch(*[v.to(DEVICE) if isinstance(v, torch.Tensor) else v for v in values])


def _sampled(logits: torch.Tensor, batch: SamplingBatch) -> list[int]:
    tokens: list[int] = sample_on_device(logits.to(DEVICE), _moved(batch)).tolist()
    return tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1000, 128256 if ON_GPU else 5000])
def test_sample_on_device_equals_cpu(dtype: torch.dtype, vocab_size: int) -> None:
    temperatures = [0.0, 1.0, 0.7, 1.3, 0.0, 1.0, 0.2]
    seeds = [1, 2, 2**63 + 5, 0, 5, 123456789012345, 2**64 - 1]
    params = [
        SamplingParams(temperature=t, seed=s) for t, s in zip(temperatures, seeds, strict=True)
    ]
    batch = SamplingBatch.build(params, [5, 100, 4000, 1, 2, 70000, 2**31 - 1])
    logits = randn(len(params), vocab_size, dtype=dtype) * 3
    expected = sample(logits.cpu(), batch)
    assert _sampled(logits, batch) == expected.tolist()


def test_sample_with_scores_close_in_float32_equals_cpu() -> None:
    """The logits offset the noise of three tokens, so that rounding decides."""
    rows, vocab_size = 40, 3000
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(rows)]
    batch = SamplingBatch.build(params, list(range(7, 7 + rows)))
    noise = gumbel_noise(batch.seed, batch.position, vocab_size)
    logits = torch.full((rows, vocab_size), -40.0)
    close_ones = (-noise.abs()).topk(3).indices  # where float32 tells least of it
    logits.scatter_(1, close_ones, -noise.gather(1, close_ones).float())
    expected = sample(logits, batch)
    gaps = (logits.double() + noise).gather(1, close_ones).sort(dim=1).values.diff()
    assert gaps.max() < 1e-6
    assert len(set((expected[:, None] == close_ones).int().argmax(1).tolist())) == 3
    assert _sampled(logits, batch) == expected.tolist()


def test_sample_from_logits_of_any_size_equals_cpu() -> None:
    logits = randn(6, 2500, dtype=torch.float32).cpu()
    logits[0] *= 1e30
    logits[1, 40:] = -torch.inf
    logits[2] = -torch.inf
    logits[2, 2000] = -3e38
    logits[3, 77] = torch.inf
    logits[4] += 1e7
    logits[5] = 0.0
    params = [SamplingParams(temperature=0.9, seed=seed) for seed in range(len(logits))]
    batch = SamplingBatch.build(params, [3] * len(logits))
    assert _sampled(logits, batch) == sample(logits, batch).tolist()


def test_sample_from_equal_logits_takes_lowest_token() -> None:
    logits = torch.zeros(2, 4000, device=DEVICE)
    logits[0, [1500, 3000, 3999]] = 1.0
    batch = SamplingBatch.build([SamplingParams(temperature=0.0)] * 2, [0, 0])
    assert _sampled(logits, batch) == [1500, 0]
    assert logits.argmax(dim=-1).tolist() == [1500, 0]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_sample_from_nan_logits_names_a_token(cut: dict[str, float]) -> None:
    logits = torch.full((5, 3000), float("nan"), device=DEVICE)
    logits[2] = -torch.inf
    logits[3, 70:] = 1.0
    logits[4, 70:] = torch.inf
    params = [SamplingParams(temperature=t, **cut) for t in (0.0, 1.0, 1.0, 1.0, 1.0)]  # type: ignore[arg-type]
    batch = SamplingBatch.build(params, [0] * len(params))
    assert all(0 <= token < 3000 for token in _sampled(logits, batch))


CUTS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 400},
    {"top_k": 10**6},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.02},
    {},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.3, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("vocab_size", [1000, 128256 if ON_GPU else 20000])
def test_sample_within_topk_topp_equals_cpu(
    dtype: torch.dtype, spread: float, vocab_size: int
) -> None:
    temperatures = (0.0, 0.6, 1.3)
    params = [
        SamplingParams(temperature=t, seed=seed, **cut)  # type: ignore[arg-type]
        for cut in CUTS
        for t in temperatures
        for seed in range(4 if ON_GPU else 1)
    ]
    batch = SamplingBatch.build(params, list(range(3, 3 + len(params))))
    logits = (randn(len(params), vocab_size, dtype=torch.float32) * spread).to(dtype)
    expected = sample(logits.cpu(), batch)
    sampled = _sampled(logits, batch)
    assert sampled == expected.tolist()
    # Without cuts others would be drawn, so that they were put to the test.
    free = replace(batch, any_sorted=False, any_min_p=False)
    assert (sample(logits.cpu(), free) != expected).sum() > len(params) // 10


def test_sample_with_ties_at_the_cut_keeps_them() -> None:
    logits = torch.full((60, 2000), -9.0)
    logits[:, 100:110] = 2.0  # of these ten top_k = 3 and top_p = 0.2 keep all,
    logits[:, 7] = 1.0  # and nothing else
    params = [
        SamplingParams(temperature=1.0, seed=seed, top_k=3 * (seed % 2), top_p=1 - 0.4 * (seed % 3))
        for seed in range(30)
    ]
    params += [SamplingParams(temperature=2.0, seed=seed, top_k=11) for seed in range(30)]
    batch = SamplingBatch.build(params, [5] * len(params))
    sampled = _sampled(logits, batch)
    assert sampled == sample(logits, batch).tolist()
    kept = torch.isfinite(process_logits(logits, batch)).sum(dim=1).tolist()
    assert {10, 11, 2000} <= set(kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 5])
def test_choose_and_verify_on_device_equals_torch(dtype: torch.dtype, width: int) -> None:
    temperatures = (0.0, 1.0, 0.7, 0.0, 1.3, 1.0, 0.0)
    rows, vocab_size = len(temperatures), 5000 if not ON_GPU else 128256
    logits = randn(rows * width, vocab_size, dtype=dtype).cpu() * 3
    params = [
        SamplingParams(temperature=t, seed=2**64 - 1 - i, top_p=0.7 if i % 2 else 1.0)
        for i, t in enumerate(temperatures)
    ]
    positions = torch.arange(rows)[:, None] * 1000 + torch.arange(width)
    batch = VerifyBatch(
        input_ids=torch.zeros(rows * width, dtype=torch.int64),
        cu_seqlens=torch.arange(0, rows * width + 1, width, dtype=torch.int32),
        draft_lens=torch.tensor([width - 1, width - 1, -1, width - 1, 1, width // 2, 0]).int(),
        sampling=SamplingBatch.build(
            [each for each in params for _ in range(width)], positions.flatten().tolist()
        ),
    )
    expected = torch.empty(rows, 1 + width, dtype=torch.int32)
    torch_choose_and_verify(logits, batch, expected)
    by_row = batch.input_ids.view(rows, width)
    by_row[:, 1:] = expected[:, 1:-1]  # all agree, the ones that fill up, too,
    by_row[3, 1:3] += 1  # but in one row
    torch_choose_and_verify(logits, batch, expected)
    real = batch.draft_lens >= 0
    accepted = torch.where(torch.arange(rows) == 3, 0, batch.draft_lens.clamp(max=width - 1))
    assert expected[real, 0].tolist() == accepted[real].tolist()
    actual = torch.full((rows, 1 + width), -7, dtype=torch.int32, device=DEVICE)
    moved = VerifyBatch(
        *(each.to(DEVICE) for each in (batch.input_ids, batch.cu_seqlens, batch.draft_lens)),
        _moved(batch.sampling),
    )
    choose_and_verify(logits.to(DEVICE), moved, actual)
    assert actual[real.to(DEVICE)].tolist() == expected[real].tolist()


def test_choose_and_verify_of_ragged_rows_equals_torch() -> None:
    lens, width, vocab_size = [1, 5, 3, 0, 4, 2, 0], 5, 3000
    tokens, rows = sum(lens), len(lens)
    logits = randn(tokens, vocab_size, dtype=torch.float32).cpu() * 3
    params = [
        SamplingParams(temperature=i % 3 / 2, seed=i, top_k=9 * (i % 2))
        for i, length in enumerate(lens)
        for _ in range(length)
    ]
    batch = VerifyBatch(
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *lens]).cumsum(0).int(),
        draft_lens=torch.tensor([0, 4, 1, -1, 3, 1, -1]).int(),
        sampling=SamplingBatch.build(params, range(tokens)),
    )
    expected = torch.empty(rows, 1 + width, dtype=torch.int32)
    torch_choose_and_verify(logits, batch, expected)
    drafts = expected[:, 1:-1]
    for row, (start, length) in enumerate(zip(batch.cu_seqlens.tolist(), lens, strict=False)):
        batch.input_ids[start + 1 : start + length] = drafts[row, : max(0, length - 1)]
    batch.input_ids[int(batch.cu_seqlens[4]) + 2] += 1
    torch_choose_and_verify(logits, batch, expected)
    assert expected[:, 0].tolist() == [0, 4, 1, -1, 1, 1, -1]
    actual = torch.full((rows, 1 + width), -7, dtype=torch.int32, device=DEVICE)
    moved = VerifyBatch(
        *(each.to(DEVICE) for each in (batch.input_ids, batch.cu_seqlens, batch.draft_lens)),
        _moved(batch.sampling),
    )
    choose_and_verify(logits.to(DEVICE), moved, actual)
    for got, want, length in zip(actual.tolist(), expected.tolist(), lens, strict=True):
        assert not length or got[: 1 + length] == want[: 1 + length]
