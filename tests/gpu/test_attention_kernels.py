"""The CUDA attention backends against plain torch."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.models.kernels import DEVICE, DTYPES, ON_GPU, WIDTH, close, randn  # isort: skip - before what needs Triton
from outrider.engine.attention.base import AttentionParams
from outrider.engine.attention.sdpa import SdpaAttention
from outrider.engine.batch import PackedBatch, RowSlice, pack
from outrider.engine.cuda.attention.triton import TritonPagedAttention
from outrider.engine.cuda.llama_ops import TritonOps
from outrider.engine.kv_cache.pools import PageMajorPool
from outrider.engine.layers.ops import LlamaOps
from outrider.engine.model.attention_backends import (
    BACKEND_NAMES,
    AttentionTraits,
    choose_backend,
)
from outrider.engine.shared_prefix import SharedPrefix
from outrider.errors import ConfigError

pytestmark = pytest.mark.gpu


Rows = Sequence[tuple[int, int]]  # (tokens before, query tokens)
DECODE: Rows = [(511, 1), (3, 1), (130, 1)]
VERIFY: Rows = [(40, 5), (300, 5), (0, 5)]
MIXED: Rows = [(0, 70), (100, 5), (12, 1), (64, 3)]


def _paged(
    rows: Rows,
    page_size: int,
    shape: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    trees: Sequence[tuple[int, ...]] = (),
    *,
    float8: bool = False,
) -> tuple[PackedBatch, PageMajorPool, Tensor]:
    """A recorded batch over scattered pages, and queries that are a part of wider rows, as in a
    model.

    `trees`: the parents of each row's last tokens.
    """
    kv_heads, dim, _ = shape
    counts = [-(-(start + length) // page_size) for start, length in rows]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(3)).tolist()
    slices = [
        RowSlice([1] * length, start, [order.pop() for _ in range(count)], length, parents)
        for (start, length), count, parents in zip(
            rows, counts, trees or [()] * len(rows), strict=True
        )
    ]
    pool = PageMajorPool(sum(counts) + 1, page_size, shape, dtype, DEVICE, float8=float8)
    keys = randn(*pool.keys.shape, dtype=dtype, seed=4)
    values = randn(*pool.values.shape, dtype=dtype, seed=5)
    pool.write(_all_slots(pool), keys.flatten(0, 1), values.flatten(0, 1))
    tokens, width = sum(length for _, length in rows), kv_heads * group * dim
    query = randn(tokens, width + 2 * kv_heads * dim, dtype=dtype, seed=6)[:, :width]
    batch = replace(pack(slices, page_size, DEVICE), recorded=True)
    return batch, pool, query.view(tokens, kv_heads, group, dim)


def _all_slots(pool: PageMajorPool) -> Tensor:
    return torch.arange(pool.keys.shape[:2].numel(), device=DEVICE)


def _reference(
    batch: PackedBatch, pool: PageMajorPool, query: Tensor, params: AttentionParams
) -> Tensor:
    """In float32 of the same numbers."""
    wide = PageMajorPool(*pool.keys.shape[:2], pool.shape, torch.float32, DEVICE)
    slots = _all_slots(pool)
    keys, values = (each.transpose(0, 1).float() for each in pool.gather(slots))
    wide.write(slots, keys, values)
    sinks = None if params.sinks is None else params.sinks.float()
    params = AttentionParams(params.scaling, params.sliding_window, params.softcap, sinks)
    return SdpaAttention(batch).attend(query.float(), wide, params).to(query.dtype)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [DECODE, VERIFY, MIXED], ids=["decode", "verify", "mixed"])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("name", [name for name in BACKEND_NAMES if name != "sdpa"])
def test_backend_for_any_rows_equals_sdpa(
    name: str, float8: bool, rows: Rows, page_size: int, window: int | None
) -> None:
    dtype = torch.bfloat16
    traits = AttentionTraits(
        *(frozenset({WIDTH}), 8, 2, dtype),
        softcap=False,
        sinks=False,
        latent=False,
        float8_cache=float8,
    )
    try:
        backend = choose_backend(name, traits, DEVICE)
    except ConfigError as error:
        pytest.skip(error.message)
    batch, pool, query = _paged(rows, page_size, (2, WIDTH, WIDTH), 4, dtype, float8=float8)
    params = AttentionParams(WIDTH**-0.5, window)
    expected = _reference(batch, pool, query, params)
    for recorded in (True, False):
        attention = backend(replace(batch, recorded=recorded))
        for _ in range(2):  # as a second layer
            close(attention.attend(query, pool, params), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32] if not ON_GPU else DTYPES)
@pytest.mark.parametrize("multiprocessors", [1, 66, 132])
@pytest.mark.parametrize(
    ("shape", "group", "extra"),
    [
        ((2, 64, 64), 1, {}),
        ((1, 24, 24), 3, {"sliding_window": 7}),
        ((2, 32, 16), 2, {"softcap": 3.0}),
        ((2, 32, 32), 2, {"sinks": True}),
        ((2, 32, 32), 2, {"sinks": True, "sliding_window": 50}),
        ((2, 32, 16), 2, {"softcap": 3.0, "float8": True}),
        ((1, 24, 24), 3, {"sinks": True, "sliding_window": 7, "float8": True}),
    ],
)
def test_triton_attention_with_extras_equals_sdpa(
    dtype: torch.dtype,
    multiprocessors: int,
    shape: tuple[int, int, int],
    group: int,
    extra: dict[str, float],
) -> None:
    rows = [(0, 70), (300, 5)] if multiprocessors == 1 else [(300, 5), (7, 1)]
    batch, pool, query = _paged(rows, 16, shape, group, dtype, float8="float8" in extra)
    sinks = randn(shape[0] * group, dtype=dtype, seed=7) if "sinks" in extra else None
    window = extra.get("sliding_window")
    params = AttentionParams(
        scaling=shape[1] ** -0.5,
        sliding_window=None if window is None else int(window),
        softcap=extra.get("softcap"),
        sinks=sinks,
    )
    expected = _reference(batch, pool, query, params)
    for recorded in (True, False):
        attention = TritonPagedAttention(replace(batch, recorded=recorded), multiprocessors)
        close(attention.attend(query, pool, params), expected, dtype)


@pytest.mark.parametrize("page_size", [16, 64])  # blocks of keys of several pages, and of one
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "float8"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
)
def test_triton_attention_to_prompts_equals_sdpa(
    page_size: int, group: int, dtype: torch.dtype, float8: bool
) -> None:
    rows = [(9, 1), (130, 5), (200, 90), (0, 70), (64, 33), (63, 9), (5, 0)]
    shape = (2, 32, 32)
    batch, pool, query = _paged(rows, page_size, shape, group, dtype, float8=float8)
    params = AttentionParams(32**-0.5)
    expected = _reference(_without_empty(batch), pool, query, params)
    close(TritonPagedAttention(batch, 132).attend(query, pool, params), expected, dtype)


def _without_empty(batch: PackedBatch) -> PackedBatch:
    """Leave out the last row, which has no tokens, as a bucket's missing rows have none."""
    return replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q[:-1],
        seq_lens=batch.seq_lens[:-1],
        block_table=batch.block_table[:-1],
        query_lens=batch.query_lens[:-1],
        context_lens=batch.context_lens[:-1],
    )


TREE = (-1, -1, 0, 0, 1, 3, 5, 6)  # of eight nodes
DEEP = tuple(range(-1, 63))  # as many as fit


@pytest.mark.parametrize("multiprocessors", [1, 66, 132])
@pytest.mark.parametrize(("window", "float8"), [(None, False), (7, True), (70, False), (70, True)])
def test_triton_attention_to_trees_equals_sdpa(
    multiprocessors: int, window: int | None, float8: bool
) -> None:
    dtype, shape, group = torch.float32, (2, 32, 32), 3
    # (before, known tokens, nodes): a chain, a tree at the end of a prompt, trees alone.
    slices, trees = [(40, 5), (0, 70 + 8), (300, 1 + 8), (90, 1 + 64)], [(), TREE, TREE, DEEP]
    batch, pool, query = _paged(slices, 16, shape, group, dtype, trees, float8=float8)
    params = AttentionParams(scaling=0.2, sliding_window=window)
    expected = _reference(batch, pool, query, params)
    for recorded in (True, False):
        attention = TritonPagedAttention(replace(batch, recorded=recorded), multiprocessors)
        close(attention.attend(query, pool, params), expected, dtype)


def _new_tokens(
    rows: Rows,
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    trees: Sequence[tuple[int, ...]] = (),
    float8: bool = False,
) -> tuple[PackedBatch, PageMajorPool, Tensor, Tensor]:
    """A batch whose new slots hold nothing yet, its qkv and its rope."""
    shape = (kv_heads, dim, dim)
    batch, pool, query = _paged(rows, 16, shape, group, dtype, trees, float8=float8)
    nothing = torch.full((len(query), kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    pool.write(batch.slot_mapping, nothing, nothing)
    qkv = randn(len(query), (group + 2) * kv_heads * dim, dtype=dtype, seed=8)
    return batch, pool, qkv, randn(len(query), 2, 2, dim // 2, dtype=dtype, seed=9)


def _attend_new(
    batch: PackedBatch,
    pool: PageMajorPool,
    qkv: Tensor,
    rope: Tensor,
    multiprocessors: int,
    window: int | None = None,
) -> list[tuple[Tensor, PageMajorPool]]:
    """What attention puts out and the pool afterwards: in one launch, then one after the other."""
    ops, params = TritonOps(), AttentionParams(pool.shape[1] ** -0.5, window)
    attention = TritonPagedAttention(batch, multiprocessors)
    assert attention.takes_new(qkv.shape[1] // pool.shape[0] // pool.shape[1] - 2, params)
    results = []
    for attend in (ops.attend_new, partial(LlamaOps.attend_new, ops)):
        mine = copy.copy(pool)
        mine.keys, mine.values = pool.keys.clone(), pool.values.clone()
        mine.scales = None if pool.scales is None else pool.scales.clone()
        results.append((attend(qkv.clone(), rope, attention, mine, params), mine))
    return results


def _same(actual: Tensor, expected: Tensor) -> None:
    """To the bit, but for the order in which compilers may join float32 operations."""
    if ON_GPU and actual.dtype is torch.float32:
        close(actual, expected, torch.float32, size=4.0)
    else:
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def _same_pools(
    actual: PageMajorPool, expected: PageMajorPool, pages: Tensor | None = None
) -> None:
    some = slice(None) if pages is None else pages
    for mine, theirs in ((actual.keys, expected.keys), (actual.values, expected.values)):
        assert not mine[some].float().isnan().any()
        _same(mine[some], theirs[some])
    if actual.scales is not None and expected.scales is not None:
        _same(actual.scales[some], expected.scales[some])


@pytest.mark.parametrize(
    ("dtype", "float8"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("rows", "heads", "multiprocessors"),  # heads: kv_heads, group, dim
    [
        ([(0, 1)], (1, 4, 64), 132),
        ([(511, 1)], (2, 4, 128), 132),
        ([(300, 5)], (1, 8, 64), 132),
        ([(62, 16)], (1, 4, 64), 4),  # in the blocks of two programs
        ([(31, 64)], (1, 1, 64), 132),  # in those of four
        ([(0, 2), (95, 2), (40, 2)], (2, 1, 128), 132),
        ([(100, 1), (0, 5), (31, 3), (64, 2), (15, 1), (63, 2), (7, 4), (200, 5)], (1, 4, 64), 33),
        ([(6 * i, 1) for i in range(16)], (1, 4, 64), 66),
        ([(5 * i, 1) for i in range(33)], (1, 1, 64), 1),
        ([(5, 2), (70, 3)], (2, 3, 24), 16),
    ],
)
def test_attend_new_for_any_rows_equals_separate_launches(
    rows: Rows,
    heads: tuple[int, int, int],
    multiprocessors: int,
    window: int | None,
    dtype: torch.dtype,
    float8: bool,
) -> None:
    step = _new_tokens(rows, *heads, dtype, float8=float8)
    fused, plain = _attend_new(*step, multiprocessors, window)
    _same_pools(fused[1], plain[1])
    _same(fused[0], plain[0])


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("dtype", "float8"), [(torch.float32, False), (torch.bfloat16, True)])
def test_attend_new_with_trees_equals_separate_launches(
    window: int | None, dtype: torch.dtype, float8: bool
) -> None:
    rows, trees = [(40, 5), (25, 1 + 8), (97, 4)], [(), TREE, TREE]  # of the last half are known
    step = _new_tokens(rows, 1, 4, 64, dtype, trees, float8)
    fused, plain = _attend_new(*step, 132, window)
    _same_pools(fused[1], plain[1])
    _same(fused[0], plain[0])


def _shared(
    runs: Sequence[Sequence[tuple[int, int]]],
    query_len: int,
    heads: tuple[int, int, int],
    *,
    float8: bool,
) -> tuple[PackedBatch, PageMajorPool, Tensor, Tensor]:
    """Rows of (tokens before, pages shared with the row before), and what `_new_tokens` returns."""
    rows = [(start, query_len) for run in runs for start, _ in run]
    dtype = torch.bfloat16 if float8 else torch.float32
    batch, pool, qkv, rope = _new_tokens(rows, *heads, dtype, float8=float8)
    table = batch.block_table.clone()
    for i, (_, common) in enumerate(row for run in runs for row in run):
        table[i, :common] = table[i - 1, :common]
    row_of_token = torch.arange(len(rows), device=DEVICE).repeat_interleave(query_len)
    slots = table[row_of_token, batch.positions // 16].long() * 16 + batch.positions % 16
    nothing = torch.full((len(slots), *pool.shape[:2]), float("nan"), dtype=dtype, device=DEVICE)
    keys, values = (each.nan_to_num().transpose(0, 1) for each in pool.gather(_all_slots(pool)))
    pool.write(_all_slots(pool), keys, values)
    pool.write(slots, nothing, nothing)
    shared = SharedPrefix.of(table, batch.seq_lens, 16)
    return replace(batch, block_table=table, slot_mapping=slots, shared=shared), pool, qkv, rope


BRANCHES = [(203, 0), (200, 12), (209, 12), (204, 12), (206, 12)]
"""Of one session, and how many pages they have in common."""


@pytest.mark.parametrize(
    ("heads", "query_len", "multiprocessors"),
    [
        ((2, 4, 64), 1, 132),
        ((2, 4, 64), 2, 1),
        ((1, 1, 32), 1, 33),
        ((1, 3, 24), 2, 132),
        ((1, 8, 64), 1, 1),
        ((1, 8, 64), 2, 33),  # no two rows fit a tile
    ],
)
@pytest.mark.parametrize(
    "runs",
    [
        [BRANCHES],
        [BRANCHES[:1], BRANCHES, BRANCHES[:3] * 9, [(0, 0)]],
        [[(5, 0)] * 3, [(40, 0), (43, 2), (70, 2)], [(300, 0), (310, 3)]],
        [[(63, 0), (64, 3), (65, 3), (66, 4), (62, 3)]],
        [[(20, 0), (21, 1), (22, 1)]] * 90,
    ],
    ids=["one", "many", "short and apart", "at the end of a page", "270 rows"],
)
@pytest.mark.parametrize("float8", [False, True])
def test_attend_new_with_shared_prefix_equals_without(
    runs: Sequence[Sequence[tuple[int, int]]],
    heads: tuple[int, int, int],
    query_len: int,
    multiprocessors: int,
    float8: bool,
) -> None:
    batch, pool, qkv, rope = _shared(runs, query_len, heads, float8=float8)
    apart, _ = _attend_new(replace(batch, shared=None), pool, qkv, rope, multiprocessors)
    fused, plain = _attend_new(batch, pool, qkv, rope, multiprocessors)
    for out, mine in (fused, plain):
        _same_pools(mine, apart[1])
        close(out, apart[0], out.dtype)


@pytest.mark.parametrize(("dtype", "float8"), [(torch.float32, False), (torch.bfloat16, True)])
def test_attend_new_with_padding_rows_leaves_other_rows_alone(
    dtype: torch.dtype, float8: bool
) -> None:
    """Padding tokens store to the scratch page, all of them to one slot, or nowhere."""
    rows, real = [(37, 5), (12, 5), (0, 5), (0, 5)], [5, 2, 0, 0]
    batch, pool, qkv, rope = _new_tokens(rows, 2, 4, 64, dtype, float8=float8)
    scratch = (set(range(len(pool.keys))) - set(batch.block_table.flatten().tolist())).pop()
    padding = torch.cat([torch.arange(5) >= count for count in real]).to(DEVICE)
    slots = batch.slot_mapping.masked_fill(padding, scratch * batch.page_size)
    slots[-5:] = -1
    pool.write(batch.slot_mapping[padding], *randn(2, 13, 2, 64, dtype=dtype))
    table = batch.block_table.clone()
    table[2:] = scratch
    batch = replace(batch, slot_mapping=slots, block_table=table)
    fused, plain = _attend_new(batch, pool, qkv, rope, 132)
    pages = torch.arange(len(pool.keys), device=DEVICE) != scratch
    _same_pools(fused[1], plain[1], pages)
    _same(fused[0][~padding], plain[0][~padding])


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("trees", [False, True])
def test_attend_new_with_empty_rows_equals_without(multiprocessors: int, trees: bool) -> None:
    """As the rows that are missing in a captured step of ragged rows."""
    rows = [(37, 5), (12, 2), (3, 1)]
    parents = [(-1, 0, 0, 1), (), ()] if trees else []
    batch, pool, qkv, rope = _new_tokens(rows, 2, 4, 64, torch.float32, parents)
    batch = replace(batch, query_lens=(5,) * 3)
    places = torch.tensor([1, 2, 4], device=DEVICE)

    def among_empty(values: Tensor) -> Tensor:
        return values.new_zeros(6, *values.shape[1:]).index_copy(0, places, values)

    lengths = among_empty(batch.cu_seqlens_q.diff())
    wider = replace(
        batch,
        cu_seqlens_q=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        seq_lens=among_empty(batch.seq_lens),
        block_table=among_empty(batch.block_table),
        query_lens=(5,) * 6,
        context_lens=(max(batch.context_lens),) * 6,
        trees=batch.trees and replace(batch.trees, starts=among_empty(batch.trees.starts)),
    )
    (out, mine), _ = _attend_new(batch, pool, qkv, rope, multiprocessors)
    (wide, other), _ = _attend_new(wider, pool, qkv, rope, multiprocessors)
    close(wide, out, torch.float32, size=4.0)
    _same(other.keys, mine.keys)
    _same(other.values, mine.values)
