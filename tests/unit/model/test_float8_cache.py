"""Keys and values in 8 bits: what is rounded, what is refused, and what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.kv_cache import fp8
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.model.attention_backends import AttentionTraits, choose_backend
from outrider.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRAITS = AttentionTraits(
    *(frozenset({128}), 32, 8, torch.bfloat16),
    softcap=False,
    sinks=False,
    latent=False,
    float8_cache=True,
)


@given(st.integers(0, 2**16), st.integers(-110, 120), st.sampled_from((1, 3, 64)))
def test_quantise_at_any_size_keeps_four_digits(seed: int, power: int, dim: int) -> None:
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    numbers, scales = fp8.quantise(x)
    largest = numbers.float().abs().amax(-1)
    assert largest.min() >= 224, "the next power of two would do"
    assert torch.equal(scales.float().log2(), scales.float().log2().round())
    back = fp8.dequantise(numbers, scales, torch.float32)
    # Four digits, or of small numbers those that the least step of float8 leaves.
    bound = torch.maximum(x.abs() * 2.0**-4, scales.float()[:, None] * 2.0**-10)
    assert bool(((back - x).abs() <= bound).all())


def test_quantise_of_rounded_vectors_and_of_zeros_changes_nothing() -> None:
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    x[4] = torch.finfo(torch.float32).max / 2
    once = fp8.dequantise(*fp8.quantise(x), torch.float32)
    assert torch.equal(fp8.dequantise(*fp8.quantise(once), torch.float32), once)
    assert bool(once[:5].isfinite().all())
    assert not once[3].any()


@pytest.mark.parametrize("page_major", [True, False])
def test_float8_pools_hold_nearly_twice_the_tokens(page_major: bool) -> None:
    sizes = []
    for float8 in (False, True):
        pools = KVPools(
            *(4, 16, torch.bfloat16, CPU),
            page_major=page_major,
            num_layers=2,
            float8=float8,
        )
        layers = [pools.allocate(i, 8, 128, 128) for i in range(2)]
        tensors = [each for pool in layers for each in (pool.keys, pool.values, pool.scales)]
        held = sum(each.nbytes for each in tensors if each is not None)
        assert held == 4 * pools.bytes_per_page
        sizes.append(pools.bytes_per_page)
    assert sizes[0] / sizes[1] == 512 / 260


def test_copies_of_pages_carry_scales() -> None:
    pools = KVPools(4, 2, torch.float32, CPU, float8=True)
    pool = pools.allocate(0, 1, 4, 4)
    slots = torch.arange(8)
    pool.write(slots, *(torch.randn(2, 8, 1, 4) * 2.0 ** torch.arange(8)[:, None, None]))
    before = pool.gather(torch.tensor([2, 3]))
    pools.copy_pages(torch.tensor([1]), torch.tensor([3]))
    for copied, source in zip(pool.gather(torch.tensor([6, 7])), before, strict=True):
        assert torch.equal(copied, source)


def test_choose_backend_for_float8_cache_refuses_flash_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with pytest.raises(ConfigError, match="'flash' cannot be used: it reads no float8"):
        choose_backend("flash", TRAITS, CUDA)


def test_choose_backend_for_float8_cache_on_older_gpu_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9"):
        choose_backend(None, TRAITS, CUDA)
    monkeypatch.setattr("outrider.engine.model.attention_backends.find_spec", lambda _name: None)
    assert choose_backend(None, replace(TRAITS, float8_cache=False), CUDA) is not None
