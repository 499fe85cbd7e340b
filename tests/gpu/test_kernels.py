"""The CUDA kernels of what lies between products, and of draws, against plain torch."""

from dataclasses import fields

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPES, ON_GPU, close, randn  # isort: skip - before what needs Triton
from outrider.engine.cuda.triton_ops import TritonOps
from outrider.engine.cuda.triton_sampling import choose, choose_and_verify
from outrider.engine.kv_cache import PageMajorPool
from outrider.engine.llama_ops import TorchOps
from outrider.engine.sampling import SamplingBatch, gumbel_noise, sample, seed_keys
from outrider.engine.verifier import VerifyBatch
from outrider.engine.verifier import choose_and_verify as torch_choose_and_verify
from outrider.params import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 4096), (5, 96)])
def test_rms_norm(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, weight = randn(tokens, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
    actual = TritonOps().rms_norm(x, weight, 1e-5)
    close(actual, TorchOps().rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * 1500, dtype=dtype)
    close(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (6, 1, 24), (3, 3, 80)])
def test_norm_rotate_and_store(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
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


def test_a_negative_slot_stores_nothing() -> None:
    pool = PageMajorPool(2, 4, (1, 16, 16), torch.float32, DEVICE)
    qkv, rope = randn(2, 48, dtype=torch.float32), randn(2, 2, 2, 8, dtype=torch.float32)
    TritonOps().rotate_and_store(qkv, rope, torch.tensor([-1, 2], device=DEVICE), pool)
    assert (
        pool.values.flatten(0, 1).any(dim=-1).flatten().tolist()
        == [False] * 2 + [True] + [False] * 5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1000, 128256 if ON_GPU else 5000])
def test_choose_draws_what_the_cpu_draws(dtype: torch.dtype, vocab_size: int) -> None:
    temperatures = [0.0, 1.0, 0.7, 1.3, 0.0, 1.0, 0.2]
    seeds = [1, 2, 2**63 + 5, 0, 5, 123456789012345, 2**64 - 1]
    params = [
        SamplingParams(temperature=t, seed=s) for t, s in zip(temperatures, seeds, strict=True)
    ]
    batch = SamplingBatch.build(params, [5, 100, 4000, 1, 2, 70000, 2**31 - 1])
    logits = randn(len(params), vocab_size, dtype=dtype) * 3
    expected = sample(logits.cpu(), batch)
    on_device = [each.to(DEVICE) for each in (batch.temperature, batch.seed, batch.position)]
    assert choose(logits, *on_device).tolist() == expected.tolist()


def test_scores_that_float32_cannot_tell_apart_are_told_apart() -> None:
    """Logits that make up for the noise of three tokens: which is best follows from rounding."""
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
    on_device = [each.to(DEVICE) for each in (batch.temperature, batch.seed, batch.position)]
    assert choose(logits.to(DEVICE), *on_device).tolist() == expected.tolist()


def test_draws_from_logits_of_any_size() -> None:
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
    on_device = [each.to(DEVICE) for each in (batch.temperature, batch.seed, batch.position)]
    assert choose(logits.to(DEVICE), *on_device).tolist() == sample(logits, batch).tolist()


def test_of_equal_logits_the_lowest_token_wins() -> None:
    logits = torch.zeros(2, 4000, device=DEVICE)
    logits[0, [1500, 3000, 3999]] = 1.0
    keys = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    zeros = torch.zeros(2, device=DEVICE)
    assert choose(logits, zeros, keys, zeros.long()).tolist() == [1500, 0]
    assert logits.argmax(dim=-1).tolist() == [1500, 0]


def test_choose_names_a_token_even_for_broken_logits() -> None:
    logits = torch.full((2, 3000), float("nan"), device=DEVICE)
    keys = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    temperature = torch.tensor([0.0, 1.0], device=DEVICE)
    chosen = choose(logits, temperature, keys, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert bool(((chosen >= 0) & (chosen < 3000)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 5])
def test_drafts_are_verified_as_by_torch(dtype: torch.dtype, width: int) -> None:
    temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.3, 1.0, 0.0])
    rows, vocab_size = len(temperature), 5000 if not ON_GPU else 128256
    logits = randn(rows * width, vocab_size, dtype=dtype).cpu() * 3
    batch = VerifyBatch(
        input_ids=torch.zeros(rows, width, dtype=torch.int64),
        positions=torch.arange(rows)[:, None] * 1000 + torch.arange(width),
        draft_lens=torch.tensor([width - 1, width - 1, -1, width - 1, 1, width // 2, 0]).int(),
        temperature=temperature,
        keys=seed_keys([1, 2, 2**63 + 5, 4, 2**64 - 1, 6, 7]),
    )
    expected = torch.empty(rows, 1 + width, dtype=torch.int32)
    torch_choose_and_verify(logits, batch, expected)
    batch.input_ids[:, 1:] = expected[:, 1:-1]  # all agree, the ones that fill up, too,
    batch.input_ids[3, 1:3] += 1  # but in one row
    torch_choose_and_verify(logits, batch, expected)
    real = batch.draft_lens >= 0
    accepted = torch.where(torch.arange(rows) == 3, 0, batch.draft_lens.clamp(max=width - 1))
    assert expected[real, 0].tolist() == accepted[real].tolist()
    actual = torch.full((rows, 1 + width), -7, dtype=torch.int32, device=DEVICE)
    moved = [getattr(batch, field.name).to(DEVICE) for field in fields(batch)]
    choose_and_verify(logits.to(DEVICE), VerifyBatch(*moved), actual)
    assert actual[real.to(DEVICE)].tolist() == expected[real].tolist()
