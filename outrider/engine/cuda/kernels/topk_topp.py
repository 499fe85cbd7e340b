"""Sample within top_k, top_p and min_p without a sort, and verify drafts."""

import triton
import triton.language as tl

from outrider.engine.cuda.kernels.noise import better, nearly, order, over, rough_scores, unorder

_STAGES = tl.constexpr(3)  # of logits in flight


@triton.jit
def _likeliest(best_ptr, token_ptr, blocks, BLOCKS: tl.constexpr):
    """Return the lowest token with the best score of a greedy row: int32."""
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    best = tl.load(best_ptr + block, mask=inside, other=-float("inf"))
    token = tl.load(token_ptr + block, mask=inside, other=2147483647)
    equal = (best == tl.max(best, axis=0)) & inside
    # If the best is NaN, no token equals it, and the last one is taken.
    last = tl.max(tl.where(inside, token, 0), axis=0)
    return tl.min(tl.where(equal, token, last), axis=0)


@triton.jit
def _best_of_blocks(
    best_ptr,
    logits_ptr,
    vocab,
    blocks,
    temperature,
    keys_ptr,
    position,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the token of the best score, from the blocks with close rough scores: int32."""
    block = tl.arange(0, BLOCKS)
    rough = tl.load(best_ptr + block, mask=block < blocks, other=-float("inf"))
    ahead = tl.max(rough, axis=0)
    best = tl.full([], -float("inf"), tl.float64)
    chosen = tl.full([], 0, tl.int32) + vocab - 1
    first = ahead
    while (first >= nearly(ahead)) & (first > -float("inf")):  # mostly once
        at = tl.min(tl.where(rough == first, block, BLOCKS), axis=0)
        token = at * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf"))
        scores = rough_scores(logits, temperature, keys_ptr, position, token, ASM)
        scores = tl.where(token < vocab, scores, -float("inf"))
        best, chosen, _ = better(
            best, chosen, ahead, scores, token, logits_ptr, temperature, keys_ptr, position
        )
        rough = tl.where(block == at, -float("inf"), rough)
        first = tl.max(rough, axis=0)
    return chosen


@triton.jit
def _at_least(logits_ptr, vocab, bound, LANES: tl.constexpr):
    """Return the number of a row's logits that are at least `bound`, and the smallest of them."""
    count = tl.zeros([LANES], tl.int32)
    smallest = tl.full([LANES], float("inf"), tl.float32)
    for start in tl.range(0, vocab, LANES, num_stages=_STAGES):
        token = start + tl.arange(0, LANES)
        logits = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf"))
        logits = logits.to(tl.float32)
        there = (logits >= bound) & (token < vocab)
        count += there.to(tl.int32)
        smallest = tl.minimum(smallest, tl.where(there, logits, float("inf")))
    return tl.sum(count, axis=0), tl.min(smallest, axis=0)


@triton.jit
def _narrowed(low, middle, high, found, count):
    """Narrow a bisection for the `count`th largest, given that `found` are at least `middle`.

    It ends where both numbers are equal.
    """
    high = tl.where(found > count, high, tl.where(found == count, middle, middle - 1))
    return tl.where(found >= count, middle, low), high


@triton.jit
def _kth_largest(logits_ptr, vocab, count, highest, lanes, LANES: tl.constexpr):
    """Return a row's `count`th largest logit: float32.

    `lanes` [LANES] are the maxima of every LANESth logit. Their `count`th largest is at most the
    result, and nearly always equal to it. Otherwise bisection finds it.
    """
    top = order(highest)
    low = order(tl.where(count > LANES, -float("inf"), tl.min(lanes, axis=0)))
    high = top
    while low < high:
        middle = low + (high - low + 1) // 2
        found = tl.sum((lanes >= unorder(middle)).to(tl.int32), axis=0)
        low, high = _narrowed(low, middle, high, found, count)
    found, smallest = _at_least(logits_ptr, vocab, unorder(low), LANES)
    if found > count:
        high = top
        while low < high:
            middle = low + (high - low + 1) // 2
            found, _ = _at_least(logits_ptr, vocab, unorder(middle), LANES)
            low, high = _narrowed(low, middle, high, found, count)
        found, smallest = _at_least(logits_ptr, vocab, unorder(low), LANES)
    return smallest


@triton.jit
def _masses(logits_ptr, vocab, temperature, highest, kth, value, LANES: tl.constexpr):
    """Return the weight of a row's tokens from `kth` on, and of those above `value`: float32."""
    total, above = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    for start in tl.range(0, vocab, LANES, num_stages=_STAGES):
        token = start + tl.arange(0, LANES)
        logits = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf"))
        scaled = over(logits, temperature)
        weights = tl.where(scaled >= kth, tl.exp(scaled - highest), 0.0)
        total += weights
        above += tl.where(scaled > value, weights, 0.0)
    return tl.sum(total, axis=0), tl.sum(above, axis=0)


@triton.jit
def _best_above(
    logits_ptr,
    vocab,
    temperature,
    keys_ptr,
    position,
    value,
    least,
    LANES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the best token above `value` and at least `least`, or -1 if there is none: int32."""
    best = tl.full([], -float("inf"), tl.float64)
    ahead = tl.full([], -float("inf"), tl.float32)
    chosen = tl.full([], -1, tl.int32)
    for start in range(0, vocab, LANES):
        token = start + tl.arange(0, LANES)
        logits = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf"))
        scaled = over(logits, temperature)
        there = (scaled > value) & (scaled >= least)
        if tl.max(there.to(tl.int32), axis=0) > 0:
            rough = rough_scores(logits, temperature, keys_ptr, position, token, ASM)
            rough = tl.where(there, rough, -float("inf"))
            best, chosen, ahead = better(
                best, chosen, ahead, rough, token, logits_ptr, temperature, keys_ptr, position
            )
    return chosen


@triton.jit(do_not_specialize=["ahead"])
def choose_row_kernel(
    logits_ptr,  # [n, vocab]
    temperature_ptr,  # float32 [n], as the next four: see `SamplingBatch`
    top_k_ptr,  # int64
    top_p_ptr,  # float32
    min_p_ptr,  # float32
    keys_ptr,  # int64, two each
    position_ptr,  # int64 [n]
    best_ptr,  # float32 [n, blocks], as `choose_block_kernel` left it, like the next
    token_ptr,  # int32 [n, blocks]
    out_ptr,  # int64 [n]
    logits_stride,
    vocab,
    blocks,
    ahead,  # as for `choose_block_kernel`
    BLOCKS: tl.constexpr,  # at least blocks
    BLOCK: tl.constexpr,  # tokens of each of them
    LANES: tl.constexpr,  # tokens at a time
    ASM: tl.constexpr,
):
    """Choose the best of a row's tokens within top_k, top_p and min_p.

    The best token of all is tried first. Where it is excluded, so are all that are not likelier,
    and the best of the likelier ones is tried next. top_p keeps a token if the likelier ones have
    less than top_p of the mass.
    """
    row = tl.program_id(0).to(tl.int64)
    best_ptr += row * blocks
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        token = _likeliest(best_ptr, token_ptr + row * blocks, blocks, BLOCKS)
        tl.store(out_ptr + row, token.to(tl.int64))
        return
    logits_ptr += row * logits_stride
    keys_ptr += 2 * row
    position = tl.load(position_ptr + row) + ahead
    token = _best_of_blocks(
        best_ptr, logits_ptr, vocab, blocks, temperature, keys_ptr, position, BLOCKS, BLOCK, ASM
    )
    tl.store(out_ptr + row, token.to(tl.int64))
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0):
        return
    lanes = tl.full([LANES], -float("inf"), tl.float32)
    for start in tl.range(0, vocab, LANES, num_stages=_STAGES):
        some = start + tl.arange(0, LANES)
        logits = tl.load(logits_ptr + some, mask=some < vocab, other=-float("inf"))
        lanes = tl.maximum(lanes, logits.to(tl.float32))
    largest = tl.max(lanes, axis=0)
    highest = over(largest, temperature)
    kth = tl.full([], -float("inf"), tl.float32)
    if (top_k > 0) & (top_k < vocab):
        kth = over(_kth_largest(logits_ptr, vocab, top_k, largest, lanes, LANES), temperature)
    least = tl.maximum(kth, highest + tl.log(min_p))
    looking = tl.full([], True, tl.int1)
    while looking:
        value = over(tl.load(logits_ptr + token), temperature)
        kept = value >= least
        if kept & (top_p < 1.0):
            total, above = _masses(logits_ptr, vocab, temperature, highest, kth, value, LANES)
            kept = above < top_p * total
        looking = ~kept
        if looking:
            other = _best_above(
                logits_ptr, vocab, temperature, keys_ptr, position, value, least, LANES, ASM
            )
            looking = other >= 0  # none if the logits are NaN
            token = tl.where(looking, other, token)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def verify_row_kernel(
    chosen_ptr,  # int64 [num_tokens]
    input_ids_ptr,  # int64 [num_tokens]: per row the token before the drafts, then these
    cu_seqlens_ptr,  # int32 [rows + 1]
    draft_lens_ptr,  # int32 [rows]
    out_ptr,  # int32 [rows, 1 + WIDTH]: accepted draft tokens, then the choices
    WIDTH: tl.constexpr,  # tokens of a row at most
    PADDED: tl.constexpr,  # at least WIDTH
):
    """Count the accepted draft tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    start = tl.load(cu_seqlens_ptr + row)
    length = tl.load(cu_seqlens_ptr + row + 1) - start
    chosen = tl.load(chosen_ptr + start + place, mask=place < length, other=0)
    draft = tl.load(input_ids_ptr + start + place + 1, mask=place + 1 < length, other=-1)
    # Padding of a draft may equal a choice by chance.
    agrees = (draft == chosen) & (place < tl.load(draft_lens_ptr + row))
    accepted = tl.min(tl.where(agrees, PADDED, place), axis=0)
    out = out_ptr + row * (1 + WIDTH)
    tl.store(out, accepted)
    tl.store(out + 1 + place, chosen.to(tl.int32), mask=place < WIDTH)
