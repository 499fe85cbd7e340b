"""Greedy or sampled chains of a small Llama in one compiled call, on one CPU core.

At batch 1 a draft model spends its time on reading weights, and on dispatching the operations
between them. So weights stay in bfloat16 where that loses nothing, a chain returns to Python only
at its end, and the products read four streams of weights at once, for the prefetcher.

All kernels but those for vectors (`engine.cpu`) are in this one file: Numba notices a changed file,
not a changed callee elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from outrider.drafting.cpu import compiled as base
from outrider.drafting.cpu.llama_weights import Floats, Matrix, Weights
from outrider.engine.cpu.attend import highest
from outrider.engine.cpu.int8_linear import BLOCK, row_product
from outrider.engine.cpu.scalars import array, bits, element_of, exp, take, values_of, widen

Ints = NDArray[np.int64]

_Float = float | np.float32
_Word = int | np.uint32
_LN2 = math.log(2.0)
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


class Fed(NamedTuple):
    """Tokens to feed, each in a row's place of the cache."""

    tokens: Ints  # [num_tokens]
    positions: Ints  # [num_tokens]
    rows: Ints  # [num_tokens], ascending
    block_tables: Ints  # [num_rows, max_pages]


class Draws(NamedTuple):
    """Sampling parameters by row, as in `engine.sampling.sample.SamplingBatch`."""

    temperature: Floats  # [num_rows]; 0: greedy
    top_k: Ints
    top_p: Floats
    min_p: Floats
    keys: NDArray[np.uint32]  # [num_rows, 2]: the seed's


def compiled(function: _Kernel) -> _Kernel:
    """Compile a kernel of this file."""
    # Sums may be reordered, else nothing vectorises; NaN and infinity keep their meaning.
    fast = {"reassoc", "contract", "arcp", "nsz"}
    return base.compiled(function, fastmath=fast, error_model="numpy")


@compiled
def draft(
    weights: Weights,
    pools: Floats,  # [layers, 2 * kv_heads, num_pages, page_size, dim], keys first
    fed: Fed,
    wanted: Ints,  # [num_rows], largest first, at least 1
    draws: Draws,
) -> tuple[Ints, Floats]:
    """Feed the tokens, then draft `wanted` tokens a row: [num_rows, max wanted], with their gaps.

    A gap is how far a token's score is ahead of the runner-up's. Every row has a token in `fed`.
    Tokens beyond a row's `wanted` are undefined.
    """
    num_rows = len(wanted)
    chains = np.empty((num_rows, wanted[0]), np.int64)
    gaps = np.empty((num_rows, wanted[0]), np.float32)
    fed_hidden = _forward(weights, pools, fed)
    hidden = np.empty((num_rows, fed_hidden.shape[1]), np.float32)
    position = np.empty(num_rows, np.int64)  # of the last token fed
    for i in range(len(fed.rows)):  # a row's last token stays
        position[fed.rows[i]] = fed.positions[i]
        hidden[fed.rows[i]] = fed_hidden[i]
    logits = np.empty((num_rows, len(weights.head)), np.float32)
    rows = np.arange(num_rows)
    active = num_rows
    for step in range(wanted[0]):
        if step > 0:
            while wanted[active - 1] <= step:
                active -= 1
            tokens = chains[:active, step - 1].copy()
            hidden = _forward(
                weights, pools, Fed(tokens, position[:active], rows[:active], fed.block_tables)
            )
        _product(hidden[:active], weights.head, logits[:active])
        for row in range(active):
            position[row] += 1
            if draws.temperature[row] == 0.0:
                token = np.argmax(logits[row])
                best = logits[row, token]
                logits[row, token] = -np.inf
                chains[row, step], gaps[row, step] = token, best - logits[row].max()
            else:
                chains[row, step], gaps[row, step] = draw(logits[row], draws, row, position[row])
    return chains, gaps


def biased_chains(arguments: Any) -> None:
    """Draw tokens left to right, each one's logits biased by those before; a row is an item.

    Arguments: embedding [vocab, rank], product [known, rank], its scales, joint [3 * rank,
    2 * rank + hidden] of a state that goes along (0: none), its bias, ids int64 [known] of the
    tokens (0: all, in order), weight float32 [hidden + rank or hidden] and bias [1] of how sure a
    token is; of rows, known [depth, known] logits, normed [depth, hidden], which they are logits
    of, the token before int64, the first token's position int64, temperature (0: greedy), top_k,
    top_p, min_p, keys uint32 [2], and results int32 [4, depth]: tokens, parents, zeros, and the
    bits of logarithms of how sure they are; then vocab, known, rank, hidden, depth, width of the
    weight.
    """
    args, element = values_of(arguments), element_of(arguments)
    product = array(args[3], args[21] * args[22], element).reshape(args[21], args[22])
    _draw_chains(arguments, product, array(args[4], 0, np.float32))


def rounded_chains(arguments: Any) -> None:
    """Do as `biased_chains` with the numbers and scales of `Int8Weight` as product."""
    args = values_of(arguments)
    blocks = -(-args[21] // BLOCK)
    product = array(args[3], blocks * BLOCK * args[22] // 4, np.int32)
    _draw_chains(arguments, product, array(args[4], blocks * BLOCK, np.float32))


@compiled
def _draw_chains(arguments: Any, product: Any, scales: Floats) -> None:
    args, element, num_rows = values_of(arguments), element_of(arguments), values_of(arguments)[1]
    vocab, num_known, rank, hidden, depth = args[20], args[21], args[22], args[23], args[24]
    embedding = array(args[2], vocab * rank, element)
    width = 2 * rank + hidden
    joint = array(args[5], 3 * rank * width if args[5] else 0, element).reshape(-1, width)
    joint_bias = array(args[6], len(joint), element)
    ids = array(args[7], num_known if args[7] else 0, np.int64)
    sure = array(args[8], args[25], np.float32)
    sure_bias = array(args[9], 1, np.float32)
    all_known = array(args[10], num_rows * depth * num_known, element)
    all_normed = array(args[11], num_rows * depth * hidden, element)
    last, position = array(args[12], num_rows, np.int64), array(args[13], num_rows, np.int64)
    draws = Draws(
        array(args[14], num_rows, np.float32),
        array(args[15], num_rows, np.int64),
        array(args[16], num_rows, np.float32),
        array(args[17], num_rows, np.float32),
        array(args[18], 2 * num_rows, np.uint32).reshape(num_rows, 2),
    )
    chains = array(args[19], num_rows * 4 * depth, np.int32)
    before = np.empty((1, rank), np.float32)
    normed = np.empty(hidden, np.float32)
    inputs = np.empty((1, width), np.float32)  # of which the state comes first
    parts = np.empty((1, len(joint)), np.float32)
    added = np.empty((1, num_known), np.float32)
    logits = np.full(vocab, -np.inf, np.float32)
    row = take(arguments)
    while row < num_rows:
        token = last[row]
        inputs[:, :rank] = 0
        for place in range(depth):
            slot = row * depth + place
            for i in range(rank):
                before[0, i] = widen(embedding[token * rank + i])
            for i in range(hidden):
                normed[i] = widen(all_normed[slot * hidden + i])
            odds = sure_bias[0]
            for i in range(hidden):
                odds += sure[i] * normed[i]
            for i in range(len(sure) - hidden):
                odds += sure[hidden + i] * before[0, i]
            if len(joint):
                inputs[:, rank : 2 * rank] = before
                inputs[0, 2 * rank :] = normed
                _product(inputs, joint, parts)
                for i in range(3 * rank):
                    parts[0, i] += widen(joint_bias[i])
                for i in range(rank):
                    keep = _sigmoid(parts[0, i])
                    new = np.tanh(parts[0, rank + i])
                    inputs[0, i] = new + keep * (inputs[0, i] - new)
                    before[0, i] = np.tanh(parts[0, 2 * rank + i])
            _bias(before, product, scales, added)
            known = all_known[slot * num_known : (slot + 1) * num_known]
            if len(ids):
                for i in range(num_known):
                    logits[ids[i]] = widen(known[i]) + added[0, i]
            else:
                for i in range(num_known):
                    logits[i] = widen(known[i]) + added[0, i]
            if draws.temperature[row] == 0.0:
                best = highest(logits)
                token = 0
                while token < vocab - 1 and logits[token] < best:
                    token += 1
            else:
                token, _ = draw(logits, draws, row, position[row] + place)
            at = row * 4 * depth + place
            chains[at], chains[at + depth], chains[at + 2 * depth] = token, place - 1, 0
            log_sure = np.float32(min(odds, 0.0) - math.log1p(math.exp(-abs(odds))))
            chains[at + 3 * depth] = np.int32(bits(log_sure))
        row = take(arguments)


def _bias(before: Any, product: Any, scales: Any, added: Any) -> None:
    """Multiply `before` [1, rank] by float32, bfloat16 or int8 weights to `added` [1, known]."""


@overload(_bias)  # type: ignore[untyped-decorator]
def _bias_typed(before: Any, product: Any, scales: Any, added: Any) -> Any:  # noqa: ARG001
    def plain(before: Any, product: Any, scales: Any, added: Any) -> Any:  # noqa: ARG001
        _product(before, product, added)

    def rounded(before: Any, product: Any, scales: Any, added: Any) -> Any:
        row_product(before[0], product, scales, added[0])

    return rounded if product.dtype == types.int32 else plain


@compiled
def _forward(weights: Weights, pools: Floats, fed: Fed) -> Floats:
    """Write keys and values; return normed last hidden states [num_tokens, hidden]."""
    kv_heads, page_size, dim = pools.shape[1] // 2, pools.shape[3], pools.shape[4]
    num_tokens, width = len(fed.tokens), weights.o.shape[2]
    num_group = width // dim // kv_heads  # query heads that share a key head
    x = np.empty((num_tokens, len(weights.norm)), np.float32)
    for t in range(num_tokens):
        row = weights.embedding[fed.tokens[t]]
        for i in range(len(row)):
            x[t, i] = widen(row[i])
    normed = np.empty_like(x)
    added = np.empty_like(x)
    qkv = np.empty((num_tokens, weights.qkv.shape[1]), np.float32)
    attended = np.empty((num_tokens, width), np.float32)
    gate_up = np.empty((num_tokens, weights.gate_up.shape[1]), np.float32)
    gated = np.empty((num_tokens, weights.down.shape[2]), np.float32)
    scores = np.empty((num_group, fed.block_tables.shape[1] * page_size), np.float32)
    for layer in range(len(pools)):
        pool = pools[layer]
        _rms_norm(x, weights.input_norm[layer], weights.eps, normed)
        _product(normed, weights.qkv[layer], qkv)
        for t in range(num_tokens):
            _store(qkv[t], weights.qkv_bias[layer], weights, pool, fed, t)
        for t in range(num_tokens):
            table = fed.block_tables[fed.rows[t]]
            length = fed.positions[t] + 1
            queries, out = qkv[t, :width].reshape(-1, dim), attended[t].reshape(-1, dim)
            for kv_head in range(kv_heads):
                group = slice(kv_head * num_group, (kv_head + 1) * num_group)
                keys, values = pool[kv_head], pool[kv_heads + kv_head]
                _attend(queries[group], keys, values, table, length, scores, out[group])
        _product(attended, weights.o[layer], added)
        x += added
        _rms_norm(x, weights.post_norm[layer], weights.eps, normed)
        _product(normed, weights.gate_up[layer], gate_up)
        _silu_mul(gate_up, gated)
        _product(gated, weights.down[layer], added)
        x += added
    _rms_norm(x, weights.norm, weights.eps, normed)
    return normed


@compiled
def _product(x: Floats, matrix: Matrix, out: Floats) -> None:
    """Multiply x [n, in] by matrix [out, in] to out [n, out].

    It reads four rows of the matrix at a time, a quarter of the matrix apart: each is a stream of
    its own to the prefetcher. The quarters overlap where the number of rows is no multiple of four.
    """
    quarter = (len(matrix) + 3) // 4
    last = len(matrix) - quarter
    start_1, start_2 = min(quarter, last), min(2 * quarter, last)
    for i in range(quarter):
        row_0, row_1 = matrix[i], matrix[start_1 + i]
        row_2, row_3 = matrix[start_2 + i], matrix[last + i]
        for t in range(len(x)):
            vector = x[t]
            sum_0 = sum_1 = sum_2 = sum_3 = np.float32(0.0)
            for j in range(len(vector)):
                value = vector[j]
                sum_0 += widen(row_0[j]) * value
                sum_1 += widen(row_1[j]) * value
                sum_2 += widen(row_2[j]) * value
                sum_3 += widen(row_3[j]) * value
            out[t, i] = sum_0
            out[t, start_1 + i] = sum_1
            out[t, start_2 + i] = sum_2
            out[t, last + i] = sum_3


@compiled
def _attend(
    queries: Floats,  # [group, dim]
    keys: Floats,  # [num_pages, page_size, dim]
    values: Floats,  # [num_pages, page_size, dim]
    table: Ints,
    length: int,
    scores: Floats,  # scratch [group, max_pages * page_size]
    out: Floats,  # [group, dim]
) -> None:
    page_size, dim = keys.shape[1], keys.shape[2]
    num_pages = (length + page_size - 1) // page_size
    for i in range(num_pages):  # beyond the length too, where weights become 0
        _product(queries, keys[table[i]], scores[:, i * page_size : (i + 1) * page_size])
    scale = np.float32(dim**-0.5)
    for head in range(len(queries)):
        weights, sums = scores[head], out[head]
        highest = weights[:length].max()
        total = np.float32(0.0)
        for i in range(length):
            weights[i] = exp((weights[i] - highest) * scale)
            total += weights[i]
        for i in range(length):
            weights[i] /= total
        weights[length : num_pages * page_size] = 0.0
        sums[:] = 0.0
        quarter = page_size // 4
        for i in range(num_pages):
            page = values[table[i]]
            for j in range(quarter):
                k = i * page_size + j
                row_0, row_1 = page[j], page[quarter + j]
                row_2, row_3 = page[2 * quarter + j], page[3 * quarter + j]
                weight_0, weight_1 = weights[k], weights[quarter + k]
                weight_2, weight_3 = weights[2 * quarter + k], weights[3 * quarter + k]
                for d in range(dim):
                    sums[d] += (
                        weight_0 * row_0[d]
                        + weight_1 * row_1[d]
                        + weight_2 * row_2[d]
                        + weight_3 * row_3[d]
                    )


@compiled
def _sigmoid(x: _Float) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))


@compiled
def _rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    for t in range(len(x)):
        row = x[t]
        squares = np.float32(0.0)
        for i in range(len(row)):
            squares += row[i] * row[i]
        scale = np.float32(1.0 / math.sqrt(squares / len(row) + eps))
        for i in range(len(row)):
            out[t, i] = weight[i] * (row[i] * scale)


@compiled
def _store(qkv: Floats, bias: Floats, weights: Weights, pool: Floats, fed: Fed, token: int) -> None:
    """Add the bias to one token's qkv, rotate queries and keys, and store keys and values."""
    num_stored, _, page_size, dim = pool.shape
    position = fed.positions[token]
    page = fed.block_tables[fed.rows[token], position // page_size]
    cos, sin = weights.cos[position], weights.sin[position]
    half = dim // 2
    num_heads = len(qkv) // dim
    for i in range(len(qkv)):
        qkv[i] += bias[i]
    for head in range(num_heads):
        start = head * dim
        if head < num_heads - num_stored // 2:
            for i in range(start, start + half):
                first, second = qkv[i], qkv[half + i]
                qkv[i] = first * cos[i - start] - second * sin[i - start]
                qkv[half + i] = second * cos[i - start] + first * sin[i - start]
        if head >= num_heads - num_stored:
            slot = pool[head - num_heads + num_stored, page, position % page_size]
            for i in range(dim):
                slot[i] = qkv[start + i]


@compiled
def _silu_mul(gate_up: Floats, out: Floats) -> None:
    width = out.shape[1]
    for t in range(len(out)):
        for i in range(width):
            gate = gate_up[t, i]
            out[t, i] = gate * _sigmoid(gate) * gate_up[t, width + i]


@compiled
def draw(logits: Floats, draws: Draws, row: int, position: int) -> tuple[int, float]:
    """Return the token that `engine.sampling.sample.sample` draws, and its gap to the runner-up.

    It is the same token up to the last bits of logarithms.

    A cut by top_p keeps a token if likelier ones hold less than top_p of the mass. So no sort is
    needed: a token drawn from below the cut is excluded with all that are not likelier, and another
    one is drawn.
    """
    scaled = logits / draws.temperature[row]
    highest = scaled.max()
    kth: _Float = np.float32(-np.inf)
    if 0 < draws.top_k[row] < len(scaled):
        kth = np.partition(scaled, len(scaled) - draws.top_k[row])[len(scaled) - draws.top_k[row]]
    floor = kth
    if draws.min_p[row] > 0.0:
        floor = max(floor, highest + np.float32(math.log(draws.min_p[row])))
    first = _mix(draws.keys[row, 0] ^ np.uint32(position))
    second = _mix(draws.keys[row, 1] ^ np.uint32(position))
    cut_mass = np.float64(np.inf)
    if draws.top_p[row] < 1.0:
        cut_mass = draws.top_p[row] * _mass(scaled, kth, highest)
    while True:
        token, gap = _noisiest(scaled, floor, first, second)
        floor = np.nextafter(scaled[token], np.float32(np.inf))
        if scaled[token] == highest or _mass(scaled, floor, highest) < cut_mass:
            return token, gap


@compiled
def _mass(scaled: Floats, floor: _Float, highest: _Float) -> float:
    """Return the sum of exponentials, relative to the highest, of logits of `floor` or more."""
    mass = 0.0
    for i in range(len(scaled)):
        if scaled[i] >= floor:
            mass += math.exp(scaled[i] - highest)
    return mass


@compiled
def _noisiest(scaled: Floats, floor: _Float, first: _Word, second: _Word) -> tuple[int, float]:
    """Return the token of the largest logit plus noise among those of `floor` or more.

    With it how far the next largest is behind.
    """
    best, best_score, next_score = 0, -np.inf, -np.inf
    for i in range(len(scaled)):
        if scaled[i] < floor:
            continue
        hashed = _mix(np.uint32((_mix(np.uint32(i)) ^ first) + second))
        # -log(-log(u)) < -log(1 - u): a bound from its power of two saves most logarithms.
        rest = np.float64(np.uint32(~hashed)) + 0.5
        exponent = (np.float64(rest).view(np.int64) >> 52) - 1023
        if scaled[i] + (32 - exponent) * _LN2 <= next_score:
            continue
        score = scaled[i] - math.log(-math.log((hashed + 0.5) * 2.0**-32))
        if score > best_score:
            best, best_score, next_score = i, score, best_score
        elif score > next_score:
            next_score = score
    return best, best_score - next_score


@compiled
def _mix(x: _Word) -> _Word:
    """Apply the bijection of 32-bit integers of `engine.sampling`."""
    x = np.uint32(x ^ (x >> 16))
    x = np.uint32(x * 0x21F0AAAD)
    x = np.uint32(x ^ (x >> 15))
    x = np.uint32(x * 0x735A2D97)
    return np.uint32(x ^ (x >> 15))
