"""The CUDA kernels against plain torch.

Without a GPU the Triton ones run on Triton's interpreter:
TRITON_INTERPRET=1 pytest -m gpu -W ignore::RuntimeWarning tests/gpu
"""

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from outrider.engine.attention import AttentionParams  # noqa: E402
from outrider.engine.backends import (  # noqa: E402
    BACKEND_NAMES,
    AttentionTraits,
    choose_backend,
)
from outrider.engine.batch import PackedBatch, RowSlice, pack  # noqa: E402
from outrider.engine.cuda.graphs import CudaGraphs  # noqa: E402
from outrider.engine.cuda.paged_attention import TritonPagedAttention  # noqa: E402
from outrider.engine.cuda.products import FewRowsLinear, Strips, Tiles, Way  # noqa: E402
from outrider.engine.cuda.triton_ops import TritonOps  # noqa: E402
from outrider.engine.cuda.triton_sampling import choose, choose_and_verify  # noqa: E402
from outrider.engine.kv_cache import PageMajorPool  # noqa: E402
from outrider.engine.llama_ops import LlamaOps, TorchOps, Use  # noqa: E402
from outrider.engine.sampling import SamplingBatch, sample, seed_keys  # noqa: E402
from outrider.engine.sdpa import SdpaAttention  # noqa: E402
from outrider.engine.verifier import VerifyBatch  # noqa: E402
from outrider.engine.verifier import choose_and_verify as torch_choose_and_verify  # noqa: E402
from outrider.errors import ConfigError  # noqa: E402
from outrider.params import SamplingParams  # noqa: E402

pytestmark = pytest.mark.gpu

ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.004}
WIDTH = 128 if ON_GPU else 16  # of a head: the interpreter is slow


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype, size: float = 1.0) -> None:
    """`size`: of the numbers that were added and rounded on the way."""
    assert actual.dtype == expected.dtype == dtype
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * size, check_stride=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 4096), (5, 96)])
def test_rms_norm(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, weight = _random(tokens, hidden, dtype=dtype), _random(hidden, dtype=dtype, seed=1)
    actual = TritonOps().rms_norm(x, weight, 1e-5)
    _close(actual, TorchOps().rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = _random(3, 2 * 1500, dtype=dtype)
    _close(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (6, 1, 24), (3, 3, 80)])
def test_norm_rotate_and_store(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    tokens = 5
    qkv = _random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    weight = _random(heads + kv_heads, dim, dtype=dtype, seed=1)
    rope = _random(tokens, 2, 2, dim // 2, dtype=dtype, seed=2)
    slots = torch.tensor([3, 9, 17, 0, 30], device=DEVICE)
    results = []
    for ops in (TritonOps(), TorchOps()):
        pool = PageMajorPool(4, 8, (kv_heads, dim, dim), dtype, DEVICE)
        mine = qkv.clone()
        ops.qk_norm_(mine, weight, 1e-6)
        query = ops.rotate_and_store(mine, rope, slots, pool)
        results.append((query, pool.keys, pool.values))
    for actual, expected in zip(*results, strict=True):
        _close(actual, expected, dtype, size=4.0)


def test_a_negative_slot_stores_nothing() -> None:
    pool = PageMajorPool(2, 4, (1, 16, 16), torch.float32, DEVICE)
    qkv, rope = _random(2, 48, dtype=torch.float32), _random(2, 2, 2, 8, dtype=torch.float32)
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
    logits = _random(len(params), vocab_size, dtype=dtype) * 3
    expected = sample(logits.cpu(), batch)
    on_device = [each.to(DEVICE) for each in (batch.temperature, batch.seed, batch.position)]
    assert choose(logits, *on_device).tolist() == expected.tolist()


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
    logits = _random(rows * width, vocab_size, dtype=dtype).cpu() * 3
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
) -> tuple[PackedBatch, PageMajorPool, Tensor]:
    """A batch over scattered pages, and queries that are a part of wider rows, as in a model.

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
    pool = PageMajorPool(sum(counts) + 1, page_size, shape, dtype, DEVICE)
    pool.keys.copy_(_random(*pool.keys.shape, dtype=dtype, seed=4))
    pool.values.copy_(_random(*pool.values.shape, dtype=dtype, seed=5))
    tokens, width = sum(length for _, length in rows), kv_heads * group * dim
    query = _random(tokens, width + 2 * kv_heads * dim, dtype=dtype, seed=6)[:, :width]
    return pack(slices, page_size, DEVICE), pool, query.view(tokens, kv_heads, group, dim)


def _reference(
    batch: PackedBatch, pool: PageMajorPool, query: Tensor, params: AttentionParams
) -> Tensor:
    """In float32 of the same numbers."""
    wide = PageMajorPool(*pool.keys.shape[:2], pool.shape, torch.float32, DEVICE)
    wide.keys.copy_(pool.keys)
    wide.values.copy_(pool.values)
    sinks = None if params.sinks is None else params.sinks.float()
    params = AttentionParams(params.scaling, params.sliding_window, params.softcap, sinks)
    return SdpaAttention(batch).attend(query.float(), wide, params).to(query.dtype)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [DECODE, VERIFY, MIXED], ids=["decode", "verify", "mixed"])
@pytest.mark.parametrize("name", [name for name in BACKEND_NAMES if name != "sdpa"])
def test_backends(name: str, rows: Rows, page_size: int, window: int | None) -> None:
    dtype = torch.bfloat16
    traits = AttentionTraits(
        frozenset({WIDTH}), 8, 2, page_size, dtype, softcap=False, sinks=False, latent=False
    )
    try:
        backend = choose_backend(name, traits, DEVICE)
    except ConfigError as error:
        pytest.skip(error.message)
    batch, pool, query = _paged(rows, page_size, (2, WIDTH, WIDTH), 4, dtype)
    params = AttentionParams(WIDTH**-0.5, window)
    attention = backend(batch)
    expected = _reference(batch, pool, query, params)
    for _ in range(2):  # the second layer finds everything prepared
        _close(attention.attend(query, pool, params), expected, dtype)


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
    ],
)
def test_triton_attention(
    dtype: torch.dtype,
    multiprocessors: int,
    shape: tuple[int, int, int],
    group: int,
    extra: dict[str, float],
) -> None:
    rows = [(0, 70), (300, 5)] if multiprocessors == 1 else [(300, 5), (7, 1)]
    batch, pool, query = _paged(rows, 16, shape, group, dtype)
    sinks = _random(shape[0] * group, dtype=dtype, seed=7) if "sinks" in extra else None
    window = extra.get("sliding_window")
    params = AttentionParams(
        scaling=shape[1] ** -0.5,
        sliding_window=None if window is None else int(window),
        softcap=extra.get("softcap"),
        sinks=sinks,
    )
    actual = TritonPagedAttention(batch, multiprocessors).attend(query, pool, params)
    _close(actual, _reference(batch, pool, query, params), dtype)


TREE = (-1, -1, 0, 0, 1, 3, 5, 6)  # of eight nodes
DEEP = tuple(range(-1, 63))  # as many as fit


@pytest.mark.parametrize("multiprocessors", [1, 66, 132])
@pytest.mark.parametrize("window", [None, 7, 70])
def test_attention_to_trees(multiprocessors: int, window: int | None) -> None:
    dtype, shape, group = torch.float32, (2, 32, 32), 3
    # (before, known tokens, nodes): a chain, a tree at the end of a prompt, trees alone.
    slices, trees = [(40, 5), (0, 70 + 8), (300, 1 + 8), (90, 1 + 64)], [(), TREE, TREE, DEEP]
    batch, pool, query = _paged(slices, 16, shape, group, dtype, trees)
    params = AttentionParams(scaling=0.2, sliding_window=window)
    actual = TritonPagedAttention(batch, multiprocessors).attend(query, pool, params)
    _close(actual, _reference(batch, pool, query, params), dtype)


def _new_tokens(
    rows: Rows,
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    trees: Sequence[tuple[int, ...]] = (),
) -> tuple[PackedBatch, PageMajorPool, Tensor, Tensor]:
    """A batch whose new slots hold nothing yet, its qkv and its rope."""
    batch, pool, query = _paged(rows, 16, (kv_heads, dim, dim), group, dtype, trees)
    nothing = torch.full((len(query), kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    pool.write(batch.slot_mapping, nothing, nothing)
    qkv = _random(len(query), (group + 2) * kv_heads * dim, dtype=dtype, seed=8)
    return batch, pool, qkv, _random(len(query), 2, 2, dim // 2, dtype=dtype, seed=9)


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
        mine = PageMajorPool(*pool.keys.shape[:2], pool.shape, pool.keys.dtype, DEVICE)
        mine.keys.copy_(pool.keys)
        mine.values.copy_(pool.values)
        results.append((attend(qkv.clone(), rope, attention, mine, params), mine))
    return results


def _same(actual: Tensor, expected: Tensor) -> None:
    """To the bit, but for the order in which compilers may join float32 operations."""
    if ON_GPU and actual.dtype is torch.float32:
        _close(actual, expected, torch.float32, size=4.0)
    else:
        bits = torch.int16 if actual.dtype is torch.bfloat16 else torch.int32
        assert torch.equal(actual.view(bits), expected.view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
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
def test_new_keys_are_stored_where_they_are_read(
    rows: Rows,
    heads: tuple[int, int, int],
    multiprocessors: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    fused, plain = _attend_new(*_new_tokens(rows, *heads, dtype), multiprocessors, window)
    assert not fused[1].keys.isnan().any()
    _same(fused[1].keys, plain[1].keys)
    _same(fused[1].values, plain[1].values)
    _same(fused[0], plain[0])


@pytest.mark.parametrize("window", [None, 70])
def test_new_nodes_of_trees(window: int | None) -> None:
    rows, trees = [(40, 5), (25, 1 + 8), (97, 4)], [(), TREE, TREE]  # of the last half are known
    step = _new_tokens(rows, 1, 4, 64, torch.float32, trees)
    fused, plain = _attend_new(*step, 132, window)
    _same(fused[1].keys, plain[1].keys)
    _same(fused[0], plain[0])


def test_what_fills_up_a_step_harms_no_row() -> None:
    """Its tokens store to a scratch page, all of them to one slot, or nowhere."""
    rows, real = [(37, 5), (12, 5), (0, 5), (0, 5)], [5, 2, 0, 0]
    batch, pool, qkv, rope = _new_tokens(rows, 2, 4, 64, torch.float32)
    scratch = (set(range(len(pool.keys))) - set(batch.block_table.flatten().tolist())).pop()
    inert = torch.cat([torch.arange(5) >= count for count in real]).to(DEVICE)
    slots = batch.slot_mapping.masked_fill(inert, scratch * batch.page_size)
    slots[-5:] = -1
    pool.write(batch.slot_mapping[inert], *_random(2, 13, 2, 64, dtype=torch.float32))
    table = batch.block_table.clone()
    table[2:] = scratch
    batch = replace(batch, slot_mapping=slots, block_table=table)
    fused, plain = _attend_new(batch, pool, qkv, rope, 132)
    pages = torch.arange(len(pool.keys), device=DEVICE) != scratch
    _same(fused[1].keys[pages], plain[1].keys[pages])
    _same(fused[1].values[pages], plain[1].values[pages])
    _same(fused[0][~inert], plain[0][~inert])


@pytest.mark.parametrize(
    ("way", "rows", "inner"),
    [
        *((Strips(32, 1), rows, inner) for rows in (1, 2) for inner in (8, 296)),  # no power of two
        *((Tiles(64, 64, 3, 4, 1), rows, 192) for rows in (1, 5, 16, 17)),
        *((Tiles(64, 64, 3, 4, 8), rows, 256) for rows in (1, 5, 33)),  # shared by four programs
    ],
)
def test_products_of_few_rows(
    way: Way, rows: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.linear.can_prepack", lambda *_: False)  # on CPU
    # The interpreter takes the bits of bfloat16 for numbers when it multiplies matrices.
    dtype = torch.bfloat16 if ON_GPU or isinstance(way, Strips) else torch.float32
    layer = FewRowsLinear((_random(128, inner, dtype=dtype) * inner**-0.5).to(dtype))
    x, norm = _random(rows, inner, dtype=dtype, seed=1), _random(inner, dtype=dtype, seed=2)
    plain, ours = TorchOps(), TritonOps()
    residual = _random(rows, 128, dtype=dtype, seed=3)
    expected = (
        plain.norm_linear(x, norm, 1e-5, layer),
        plain.norm_gated(x, norm, 1e-5, layer),
        layer.add(x, residual.clone()),
    )
    assert way.takes(inner)
    monkeypatch.setattr(layer, "choice", lambda _: way)
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
    _close(again, x @ layer._weight.t(), dtype, size=4.0)
    for mine, theirs in zip(actual, expected, strict=True):
        _close(mine, theirs, dtype, size=4.0)


@pytest.mark.skipif(not ON_GPU, reason="measures a device")
def test_tuned_products_in_a_recorded_chain() -> None:
    """What is chosen, and what starts early, changes nothing but roundings."""
    dtype, hidden, layers = torch.bfloat16, 2048, 8
    ops = TritonOps()
    norm = _random(hidden, dtype=dtype)
    scale = hidden**-0.5
    up = [
        FewRowsLinear(_random(4 * hidden, hidden, dtype=dtype, seed=i) * scale)
        for i in range(layers)
    ]
    down = [
        FewRowsLinear(_random(hidden, 2 * hidden, dtype=dtype, seed=i) * scale)
        for i in range(layers)
    ]

    def chain(x: Tensor) -> Tensor:
        x = x.clone()
        for first, second in zip(up, down, strict=True):
            x = second.add(ops.norm_gated(x, norm, 1e-5, first), x)
        return x

    inputs = [_random(rows, hidden, dtype=dtype, seed=rows) for rows in (1, 2, 3, 8, 16, 17)]
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
