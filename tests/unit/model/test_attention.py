"""Paged attention against a dense one written down row by row."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.attention.base import AttentionBackend, AttentionParams
from outrider.engine.attention.row_groups import split_by_context
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.batch import RowSlice, pack
from outrider.engine.cpu.attention import NumbaAttention
from outrider.engine.kv_cache.pools import KVPools, LayerPool

CPU = torch.device("cpu")
PAGE_SIZE = 4
KV_HEADS, GROUP, DIM = 2, 3, 8

# (context before the step, new tokens): decode, verification, chunks short and long.
rows_strategy = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.integers(1, 6), st.integers(14, 30))),
    min_size=1,
    max_size=6,
)
params_strategy = st.builds(
    AttentionParams,
    scaling=st.just(0.4),
    sliding_window=st.sampled_from([None, 1, 3, 12, 100]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.sampled_from([None, torch.linspace(-2, 2, KV_HEADS * GROUP, dtype=torch.float64)]),
)


unmodified_strategy = st.builds(
    AttentionParams,
    scaling=st.just(0.2),
    sliding_window=st.sampled_from([None, 1, 3, 12, 33, 100]),
)


def _dense_row(query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """The last len(query) positions of one row: [Q, kv, group, dim] by the definition."""
    length, new = len(keys), len(query)
    scores = torch.einsum("qhgd,khd->hgqk", query, keys) * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    at = torch.arange(length - new, length)[:, None]
    seen = torch.arange(length)[None] <= at
    if params.sliding_window is not None:
        seen &= torch.arange(length)[None] > at - params.sliding_window
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if params.sinks is not None:
        total = total + params.sinks.to(scores.dtype).view(KV_HEADS, GROUP, 1, 1).exp()
    return torch.einsum("hgqk,khd->qhgd", weights / total, values)


def _scattered(rows: list[tuple[int, int]], seed: int) -> tuple[list[RowSlice], int]:
    """Rows over shuffled pages, and how many pages there are."""
    needed = [-(-(context + new) // PAGE_SIZE) for context, new in rows]
    pages = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(pages)
    slices = []
    for (context, new), count in zip(rows, needed, strict=True):
        table, pages = pages[:count], pages[count:]
        slices.append(RowSlice([0] * new, context, table, 1))
    return slices, sum(needed) + 3


def _fill(pool: LayerPool, slices: list[RowSlice]) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values in the rows' pages, NaN everywhere else.

    Returns them per row, as the pool holds them.
    """
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    if pool.scales is not None:
        pool.scales.fill_(float("nan"))
    filled = []
    for row in slices:
        length = row.start + len(row.token_ids)
        slots = torch.tensor(
            [row.block_table[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(length)]
        )
        heads, key_dim, value_dim = pool.shape
        dtype = pool.gather(slots)[0].dtype
        keys = torch.randn(length, heads, key_dim).to(dtype)
        values = torch.randn(length, heads, value_dim).to(dtype)
        pool.write(slots, keys, values)
        if pool.scales is not None:
            keys, values = (each.transpose(0, 1) for each in pool.gather(slots))
        filled.append((keys, values))
    return filled


def _both(
    rows: list[tuple[int, int]],
    params: AttentionParams,
    dtype: torch.dtype,
    value_dim: int | None = None,
    *,
    dim: int = DIM,
    backend: AttentionBackend = SdpaAttention,
    page_major: bool = False,
    float8: bool = False,
) -> tuple[Tensor, Tensor]:
    """(paged, dense) outputs for the same random step."""
    torch.manual_seed(0)
    slices, num_pages = _scattered(rows, seed=len(rows))
    pools = KVPools(num_pages, PAGE_SIZE, dtype, CPU, page_major=page_major, float8=float8)
    pool = pools.allocate(0, KV_HEADS, dim, value_dim or dim)
    filled = _fill(pool, slices)
    attention = backend(pack(slices, PAGE_SIZE, CPU))
    query = torch.randn(sum(new for _, new in rows), KV_HEADS, GROUP, dim).to(dtype)
    paged = attention.attend(query, pool, params)
    dense = [
        _dense_row(q.double(), keys.double(), values.double(), params)
        for q, (keys, values) in zip(query.split([new for _, new in rows]), filled, strict=True)
    ]
    return paged.double(), torch.cat(dense)


@settings(max_examples=150, deadline=None)
@given(rows_strategy, params_strategy, st.booleans(), st.booleans())
def test_sdpa_with_any_mix_of_rows_equals_dense(
    rows: list[tuple[int, int]], params: AttentionParams, page_major: bool, float8: bool
) -> None:
    paged, dense = _both(rows, params, torch.float64, page_major=page_major, float8=float8)
    torch.testing.assert_close(paged, dense)


@settings(max_examples=100, deadline=None)
@given(rows_strategy, unmodified_strategy, st.sampled_from([32, 64]), st.booleans())
def test_numba_attention_with_any_mix_of_rows_equals_dense(
    rows: list[tuple[int, int]], params: AttentionParams, dim: int, float8: bool
) -> None:
    backend = NumbaAttention.backend(torch.float64)
    paged, dense = _both(rows, params, torch.float64, dim=dim, backend=backend, float8=float8)
    torch.testing.assert_close(paged, dense)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("rows", [[(700, 5)], [(40, 1)] * 7, [(0, 300)], [(3, 8), (900, 1)]])
@pytest.mark.parametrize("window", [None, 50])
def test_numba_attention_for_dtype_is_as_exact_as_its_elements(
    dtype: torch.dtype, error: float, rows: list[tuple[int, int]], window: int | None
) -> None:
    params = AttentionParams(0.125, sliding_window=window)
    backend = NumbaAttention.backend(dtype)
    paged, dense = _both(rows, params, dtype, dim=64, backend=backend)
    torch.testing.assert_close(paged, dense, atol=error, rtol=error)


@pytest.mark.parametrize("rows", [[(700, 5)], [(200, 1)] * 4, [(130, 5), (300, 1), (90, 3)]])
@pytest.mark.parametrize("window", [None, 50])
def test_sdpa_in_bfloat16_equals_dense(rows: list[tuple[int, int]], window: int | None) -> None:
    paged, dense = _both(rows, AttentionParams(0.3, sliding_window=window), torch.bfloat16)
    torch.testing.assert_close(paged, dense, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_row_groups_of_different_context_are_split(dtype: torch.dtype) -> None:
    rows = [(30, 5), (900, 1), (20, 1), (35, 3), (2100, 5), (880, 2), (25, 1)]
    paged, dense = _both(rows, AttentionParams(0.3), dtype)
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-9
    torch.testing.assert_close(paged, dense, atol=tolerance, rtol=tolerance)
    groups = split_by_context(range(len(rows)), [context + new for context, new in rows])
    assert groups == [(0, 2, 3, 6), (1, 5), (4,)]


def test_row_groups_of_similar_context_share_a_call() -> None:
    assert split_by_context(range(4), [200, 260, 230, 300]) == [(0, 1, 2, 3)]
    assert split_by_context([], [7]) == []


def test_sdpa_with_values_of_another_width_equals_dense() -> None:
    paged, dense = _both([(9, 5), (0, 20)], AttentionParams(0.4), torch.float64, value_dim=5)
    assert paged.shape[-1] == 5
    torch.testing.assert_close(paged, dense)


def test_kv_pools_when_allocated_count_bytes_and_keep_shapes() -> None:
    pools = KVPools(3, PAGE_SIZE, torch.bfloat16, CPU)
    pool = pools.allocate(0, KV_HEADS, DIM, DIM)
    pools.allocate(1, 1, 12, 4)
    assert pools.bytes_per_page == PAGE_SIZE * 2 * (2 * KV_HEADS * DIM + 12 + 4)
    assert pools.allocate(0, KV_HEADS, DIM, DIM) is pool
    assert pool.shape == (KV_HEADS, DIM, DIM)
