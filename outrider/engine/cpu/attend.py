"""The kernel of attention over paged keys and values; `scalars` explains its form."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np

from outrider.engine.cpu.scalars import (
    array,
    bits,
    element_of,
    exp,
    loop,
    narrow,
    take,
    values_of,
    wide_of,
    widen,
)
from outrider.engine.cpu.vectors import (
    LANES,
    fma,
    larger,
    largest,
    load,
    prefetch,
    splat,
    store,
    store_sums,
)

QUERY_BLOCK = 8  # queries of a row that share one read of its keys
DIM_STEP = 2 * LANES  # divides the width of a head
_TILE = 4  # query heads, and keys, at a time
_KEYS = 32  # keys widened at a time


def attend(arguments):
    """Attend to the keys of one key head with a block of queries per item.

    Arguments: blocks, query, out, keys, values, block_table, query's stride, longest context,
    kv_heads, group, dim, number of slots, width of block_table, page_size, window, visible,
    scaling. Blocks int64 [n, 6] hold row, first token, number of tokens, slot of the first token in
    the row, first slot of the row's tree, and the slot after the last that a token sees. `visible`
    is that of `TreeMask`.
    """
    args, element, wide = values_of(arguments), element_of(arguments), wide_of(arguments)
    query_stride, longest, kv_heads, group, dim = args[8], args[9], args[10], args[11], args[12]
    num_slots, table_width, page_size, window = args[13], args[14], args[15], args[16]
    scaling = wide(bits(args[18]))
    pool_size, out_stride = num_slots * dim, kv_heads * group * dim
    blocks = array(args[2], args[1] // kv_heads * 6, np.int64)
    # No more than the largest block needs: the allocator may return large arrays to the system.
    most = 0
    for i in range(2, len(blocks), 6):
        most = max(most, blocks[i])
    heads = -(-most * group // _TILE) * _TILE
    width = -(-longest // _KEYS) * _KEYS
    queries = np.empty(heads * dim, wide)
    scores = np.zeros(heads * width, wide)
    sums = np.empty(heads * dim, wide)
    rows = np.empty(_KEYS * dim, wide)
    item = take(arguments)
    while item < args[1]:
        at, kv_head = item // kv_heads * 6, item % kv_heads
        row, token, count, place = blocks[at], blocks[at + 1], blocks[at + 2], blocks[at + 3]
        tree, end = blocks[at + 4], blocks[at + 5]
        begin = max(0, min(place, tree) - window + 1)  # of the keys
        visible = array(args[17], token + count, np.int64)
        query = array(args[3], (token + count) * query_stride, element)
        out = array(args[4], (token + count) * out_stride, element)
        keys = array(args[5], kv_heads * pool_size, element)[kv_head * pool_size :]
        values = array(args[6], kv_heads * pool_size, element)[kv_head * pool_size :]
        table = array(args[7], (row + 1) * table_width, np.int32)[row * table_width :]

        for i in range(count):  # heads of a token that share the key head are adjacent
            at = (token + i) * query_stride + kv_head * group * dim
            own = query[at : at + group * dim]
            scaled = queries[i * group * dim : (i + 1) * group * dim]
            for d in range(group * dim):
                scaled[d] = widen(own[d]) * scaling
        tiles = -(-count * group // _TILE) * _TILE
        queries[count * group * dim : tiles * dim] = 0
        sums[: tiles * dim] = 0
        for first in range(begin, end, _KEYS):
            _gather(keys, table, page_size, first, end, rows)
            _score(queries, rows, scores[first - begin :], width, tiles, min(_KEYS, end - first))
        for i in range(count * group):
            seen = scores[i * width : i * width + end - begin]
            last = place + i // group
            position = last
            if last >= tree:
                nodes, lineage = seen[tree - begin :], visible[token + i // group]
                position = tree + _hide(nodes, lineage, window, -np.inf) - 1
                last = end - 1  # not all trees are causal
            _softmax(seen, max(0, min(position - window + 1, tree)) - begin, last + 1 - begin)
            if last >= tree:  # exp(-inf) is a little more than 0, and slow to multiply with
                _hide(nodes, lineage, window, 0)
        for first in range(begin, end, _KEYS):
            _gather(values, table, page_size, first, end, rows)
            _weigh(scores[first - begin :], width, rows, sums, tiles, min(_KEYS, end - first))
        for i in range(count):
            at = (token + i) * out_stride + kv_head * group * dim
            to, found = out[at : at + group * dim], sums[i * group * dim : (i + 1) * group * dim]
            for d in range(group * dim):
                to[d] = narrow(found[d], element)
        item = take(arguments)


@loop
def _gather(pool, table, page_size, first, end, rows):
    """Widen keys first, first + 1, ... into rows [_KEYS * dim], with zeros from `end` on."""
    dim = len(rows) // _KEYS
    page = first // page_size
    offset = first - page * page_size
    for j in range(min(2 * _KEYS, end - first)):
        at = (table[page] * page_size + offset) * dim
        for d in range(0, dim, LANES):
            if j < _KEYS:
                store(rows, j * dim + d, load(pool, at + d))
            else:  # keys of the next block
                prefetch(pool, at + d)
        offset += 1
        if offset == page_size:
            page, offset = page + 1, 0
    for i in range((end - first) * dim, _KEYS * dim):
        rows[i] = 0


@loop
def _score(queries, rows, scores, width, count, keys):
    """Set scores[i, j] = queries[i] . rows[j], scores being `width` wide, for `keys` rounded up."""
    dim = len(rows) // _KEYS
    zero = splat(queries.dtype.type(0))
    for i in range(0, count, 2):
        for j in range(0, keys, _TILE):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
            for d in range(0, dim, LANES):
                a, b = load(queries, i * dim + d), load(queries, (i + 1) * dim + d)
                k0, k1 = load(rows, j * dim + d), load(rows, (j + 1) * dim + d)
                k2, k3 = load(rows, (j + 2) * dim + d), load(rows, (j + 3) * dim + d)
                a0, a1, a2, a3 = fma(a, k0, a0), fma(a, k1, a1), fma(a, k2, a2), fma(a, k3, a3)
                b0, b1, b2, b3 = fma(b, k0, b0), fma(b, k1, b1), fma(b, k2, b2), fma(b, k3, b3)
            store_sums(scores, i * width + j, a0, a1, a2, a3)
            store_sums(scores, (i + 1) * width + j, b0, b1, b2, b3)


@loop
def _hide(scores, lineage, window, value):
    """Put `value` in the scores of hidden nodes, and return the token's level, from 1.

    The token sees `window` levels, its own included.
    """
    levels = 0
    for node in range(len(scores) - 1, -1, -1):
        if (lineage >> node) & 1:
            levels += 1
            if levels <= window:
                continue
        scores[node] = value
    return levels


@loop
def highest(scores):
    """Return the largest number."""
    if len(scores) < LANES:
        return max(scores)
    found = load(scores, len(scores) - LANES)
    for k in range(0, len(scores) - LANES, LANES):
        found = larger(found, load(scores, k))
    return largest(found)


@loop
def _softmax(scores, begin, end):
    """Apply softmax in place over [begin, end), and set the rest to zero."""
    for k in range(begin):
        scores[k] = 0
    for k in range(end, len(scores)):
        scores[k] = 0
    seen = scores[begin:end]
    top = highest(seen)
    total = scores.dtype.type(0)
    for k in range(len(seen)):
        seen[k] = exp(seen[k] - top)
        total += seen[k]
    share = scores.dtype.type(1) / total
    for k in range(len(seen)):
        seen[k] *= share


@loop
def _weigh(scores, width, rows, sums, count, keys):
    """Add the sum of scores[i, j] * rows[j] over j < keys to sums[i]."""
    dim = len(rows) // _KEYS
    for i in range(0, count, _TILE):
        weight = i * width
        for d in range(0, dim, DIM_STEP):
            at = i * dim + d
            a0, b0 = load(sums, at), load(sums, at + LANES)
            a1, b1 = load(sums, at + dim), load(sums, at + dim + LANES)
            a2, b2 = load(sums, at + 2 * dim), load(sums, at + 2 * dim + LANES)
            a3, b3 = load(sums, at + 3 * dim), load(sums, at + 3 * dim + LANES)
            for j in range(keys):
                a, b = load(rows, j * dim + d), load(rows, j * dim + d + LANES)
                w0, w1 = splat(scores[weight + j]), splat(scores[weight + width + j])
                w2 = splat(scores[weight + 2 * width + j])
                w3 = splat(scores[weight + 3 * width + j])
                a0, b0 = fma(w0, a, a0), fma(w0, b, b0)
                a1, b1 = fma(w1, a, a1), fma(w1, b, b1)
                a2, b2 = fma(w2, a, a2), fma(w2, b, b2)
                a3, b3 = fma(w3, a, a3), fma(w3, b, b3)
            store(sums, at, a0)
            store(sums, at + LANES, b0)
            store(sums, at + dim, a1)
            store(sums, at + dim + LANES, b1)
            store(sums, at + 2 * dim, a2)
            store(sums, at + 2 * dim + LANES, b2)
            store(sums, at + 3 * dim, a3)
            store(sums, at + 3 * dim + LANES, b3)
