"""Rows that hold draft trees: packed, attended to and moved, against definitions by enumeration."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.draft_tree import chain_parents, depths
from outrider.engine.attention.base import AttentionBackend, AttentionParams
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.cpu.attention import NumbaAttention
from outrider.engine.kv_cache.pools import KVPools
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.features import FeatureSpec

CPU = torch.device("cpu")
PAGE_SIZE = 4
KV_HEADS, GROUP, DIM = 2, 3, 8


@dataclass(frozen=True)
class TreeRow:
    """A row whose slots are `known` tokens and then a tree; the last `new` slots are fed."""

    known: int
    parents: tuple[int, ...]  # empty: no tree
    new: int

    @property
    def length(self) -> int:
        return self.known + len(self.parents)

    def positions(self) -> list[int]:
        """Of all its slots."""
        levels = [len(self.lineage(node)) for node in range(len(self.parents))]
        return [*range(self.known), *(self.known + level - 1 for level in levels)]

    def lineage(self, node: int) -> list[int]:
        """The slots of a node and of its ancestors."""
        slots = []
        while node >= 0:
            slots.append(self.known + node)
            node = self.parents[node]
        return slots

    def seen(self, slot: int, window: int | None) -> list[int]:
        """The slots that the token in `slot` sees."""
        positions = self.positions()
        if slot < self.known:
            all_seen = list(range(slot + 1))
        else:
            all_seen = [*range(self.known), *self.lineage(slot - self.known)]
        last = positions[slot]
        return [s for s in all_seen if window is None or positions[s] > last - window]


@st.composite
def tree_rows(draw: st.DrawFn, max_nodes: int = 12) -> TreeRow:
    known, nodes = draw(st.integers(1, 40)), draw(st.integers(0, max_nodes))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(nodes))
    new = draw(st.integers(1, min(known + nodes, 30)))
    return TreeRow(known, parents, new)


def _packed(rows: list[TreeRow]) -> tuple[PackedBatch, list[list[int]], int]:
    """The batch, the slots of every row, and how many pages there are."""
    pages = list(range(sum(-(-row.length // PAGE_SIZE) for row in rows) + 3))
    num_pages = len(pages)
    random.Random(len(rows)).shuffle(pages)
    slices, slots = [], []
    for row in rows:
        count = -(-row.length // PAGE_SIZE)
        table, pages = pages[:count], pages[count:]
        start = row.length - row.new
        slices.append(RowSlice([0] * row.new, start, table, 1, row.parents))
        slots.append([table[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(row.length)])
    return pack(slices, PAGE_SIZE, CPU), slots, num_pages


def _both(
    rows: list[TreeRow],
    params: AttentionParams,
    dtype: torch.dtype = torch.float64,
    *,
    dim: int = DIM,
    backend: AttentionBackend = SdpaAttention,
    page_major: bool = False,
) -> tuple[Tensor, Tensor]:
    """(paged, dense) outputs for the same random step."""
    torch.manual_seed(0)
    batch, slots, num_pages = _packed(rows)
    pool = KVPools(num_pages, PAGE_SIZE, dtype, CPU, page_major=page_major).allocate(
        0, KV_HEADS, dim, dim
    )
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    query = torch.randn(sum(row.new for row in rows), KV_HEADS, GROUP, dim).to(dtype)
    dense = []
    queries = iter(query.double())
    for row, at in zip(rows, slots, strict=True):
        keys, values = (torch.randn(row.length, KV_HEADS, dim).to(dtype) for _ in range(2))
        pool.write(torch.tensor(at), keys, values)
        for slot in range(row.length - row.new, row.length):
            seen = row.seen(slot, params.sliding_window)
            scores = torch.einsum("hgd,khd->hgk", next(queries), keys[seen].double())
            scores *= params.scaling
            if params.softcap is not None:
                scores = torch.tanh(scores / params.softcap) * params.softcap
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            dense.append(torch.einsum("hgk,khd->hgd", weights, values[seen].double()))
    return backend(batch).attend(query, pool, params).double(), torch.stack(dense)


windows = st.sampled_from([None, 1, 2, 3, 12, 100])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(tree_rows(), min_size=1, max_size=5),
    st.builds(
        AttentionParams,
        scaling=st.just(0.4),
        sliding_window=windows,
        softcap=st.sampled_from([None, 1.5]),
    ),
    st.booleans(),
)
def test_sdpa_with_trees_shows_prefix_and_ancestors(
    rows: list[TreeRow], params: AttentionParams, page_major: bool
) -> None:
    paged, dense = _both(rows, params, page_major=page_major)
    torch.testing.assert_close(paged, dense)


@settings(max_examples=100, deadline=None)
@given(st.lists(tree_rows(), min_size=1, max_size=5), windows)
def test_numba_attention_with_trees_shows_prefix_and_ancestors(
    rows: list[TreeRow], window: int | None
) -> None:
    params = AttentionParams(0.2, sliding_window=window)
    backend = NumbaAttention.backend(torch.float64)
    paged, dense = _both(rows, params, dim=32, backend=backend)
    torch.testing.assert_close(paged, dense)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_to_largest_tree_equals_dense(
    dtype: torch.dtype, error: float, window: int | None
) -> None:
    rng = random.Random(1)
    parents = tuple(rng.randrange(-1, i) for i in range(MAX_TREE_NODES))
    deep = chain_parents(MAX_TREE_NODES)
    rows = [TreeRow(5, parents, 64), TreeRow(300, parents, 65), TreeRow(70, deep, 3)]
    params = AttentionParams(0.2, sliding_window=window)
    for backend in (SdpaAttention, NumbaAttention.backend(dtype)):
        paged, dense = _both(rows, params, dtype, dim=32, backend=backend)
        torch.testing.assert_close(paged, dense, atol=error, rtol=error)


@settings(max_examples=100, deadline=None)
@given(st.lists(tree_rows(), min_size=1, max_size=5))
def test_pack_with_trees_has_consecutive_slots_and_positions_by_depth(rows: list[TreeRow]) -> None:
    batch, slots, _ = _packed(rows)
    positions = [p for row in rows for p in row.positions()[-row.new :]]
    assert batch.positions.tolist() == positions
    fed = [s for row, at in zip(rows, slots, strict=True) for s in at[-row.new :]]
    assert batch.slot_mapping.tolist() == fed
    assert batch.context_lens == tuple(row.length for row in rows)
    assert (batch.trees is None) == (not any(row.parents for row in rows))


def test_pack_with_chain_has_no_tree_mask() -> None:
    assert depths(chain_parents(4)) == [0, 1, 2, 3]
    chain = pack([RowSlice([1, 2, 3], 4, [0, 1], 3)], PAGE_SIZE, CPU)
    tree = pack([RowSlice([1, 2, 3], 4, [0, 1], 3, (-1, 0))], PAGE_SIZE, CPU)
    assert chain.trees is None
    assert torch.equal(chain.positions, tree.positions)


@pytest.mark.parametrize("page_major", [True, False])
@pytest.mark.parametrize("num_layers", [None, 2])
@pytest.mark.parametrize("float8", [False, True])
def test_move_slots_along_a_path_copies_old_contents(
    page_major: bool, num_layers: int | None, float8: bool
) -> None:
    states = FeatureSpec(2, (1,))
    pools = KVPools(
        5,
        PAGE_SIZE,
        torch.float32,
        CPU,
        page_major=page_major,
        num_layers=num_layers,
        features=states,
        float8=float8,
    )
    layers = [pools.allocate(i, KV_HEADS, DIM, DIM) for i in range(2)]
    assert pools.features is not None
    pools.features.rows.copy_(torch.arange(10.0 * PAGE_SIZE).view(-1, 2))
    everywhere = torch.arange(5 * PAGE_SIZE)
    for layer in layers:
        keys, values = (torch.randn(len(everywhere), KV_HEADS, DIM) for _ in range(2))
        layer.write(everywhere, keys, values)
    before = [layer.gather(everywhere) for layer in layers]
    # Along a path, in which a slot is read after it was written, and one that stays twice.
    source, target = torch.tensor([6, 9, 4, 4]), torch.tensor([5, 6, 4, 4])
    pools.move_slots(source, target)
    expected = everywhere.clone()
    expected[target] = source
    assert torch.equal(pools.features.rows[:, 0] / 2, expected.to(torch.bfloat16))
    for layer, (keys, values) in zip(layers, before, strict=True):
        now_keys, now_values = layer.gather(everywhere)
        assert torch.equal(now_keys, keys[:, expected])
        assert torch.equal(now_values, values[:, expected])
