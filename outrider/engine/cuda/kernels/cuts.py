"""Draws from what top_k, top_p and min_p leave, without a sort; and verifies drafts by them."""

import triton
import triton.language as tl

from outrider.engine.cuda.kernels.noise import better, order, over, rough_scores, unorder


@triton.jit
def _best_token(best_ptr, token_ptr, blocks, BLOCKS: tl.constexpr):
    """int32: the lowest of the tokens with the best score."""
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    best = tl.load(best_ptr + block, mask=inside, other=-float("inf"))
    token = tl.load(token_ptr + block, mask=inside, other=2147483647)
    equal = (best == tl.max(best, axis=0)) & inside
    # If the best is NaN, which equals nothing, the last.
    last = tl.max(tl.where(inside, token, 0), axis=0)
    return tl.min(tl.where(equal, token, last), axis=0)


@triton.jit
def _at_least(logits_ptr, vocab, bound, BLOCK: tl.constexpr):
    """How many logits of a row are not below `bound`, and the smallest of them."""
    count = tl.full([], 0, tl.int32)
    smallest = tl.full([], float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < vocab, other=float("nan")).to(tl.float32)
        there = logits >= bound
        count += tl.sum(there.to(tl.int32), axis=0)
        smallest = tl.minimum(smallest, tl.min(tl.where(there, logits, float("inf")), axis=0))
    return count, smallest


@triton.jit
def _narrowed(low, middle, high, found, count):
    """The bounds of a bisection for the `count`th largest, of which `found` are from `middle` on.

    If it is just as many, it ends there.
    """
    high = tl.where(found > count, high, tl.where(found == count, middle, middle - 1))
    return tl.where(found >= count, middle, low), high


@triton.jit
def _kth_largest(logits_ptr, vocab, count, highest, lanes, BLOCK: tl.constexpr):
    """float32: a row's `count`th largest logit.

    `lanes` [BLOCK] are the largest of every BLOCKth logit each. Their own `count`th largest is not
    above it, nearly always it is it; if not, it is found by bisection.
    """
    top = order(highest)
    low = order(tl.where(count > BLOCK, -float("inf"), tl.min(lanes, axis=0)))
    high = top
    while low < high:
        middle = low + (high - low + 1) // 2
        found = tl.sum((lanes >= unorder(middle)).to(tl.int32), axis=0)
        low, high = _narrowed(low, middle, high, found, count)
    found, smallest = _at_least(logits_ptr, vocab, unorder(low), BLOCK)
    if found > count:
        high = top
        while low < high:
            middle = low + (high - low + 1) // 2
            found, _ = _at_least(logits_ptr, vocab, unorder(middle), BLOCK)
            low, high = _narrowed(low, middle, high, found, count)
        found, smallest = _at_least(logits_ptr, vocab, unorder(low), BLOCK)
    return smallest


@triton.jit
def _masses(logits_ptr, vocab, temperature, highest, kth, value, BLOCK: tl.constexpr):
    """float64: the weights of a row's tokens from `kth` on, and of those above `value`."""
    total, above = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf"))
        scaled = over(logits, temperature)
        weights = tl.where(scaled >= kth, tl.exp(scaled - highest), 0.0)
        total += tl.sum(weights, axis=0).to(tl.float64)
        above += tl.sum(tl.where(scaled > value, weights, 0.0), axis=0).to(tl.float64)
    return total, above


@triton.jit
def _best_above(
    logits_ptr,
    vocab,
    temperature,
    keys_ptr,
    position,
    value,
    least,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):
    """int32: the token of best score among those above `value` and from `least` on; -1 if none."""
    best = tl.full([], -float("inf"), tl.float64)
    ahead = tl.full([], -float("inf"), tl.float32)
    chosen = tl.full([], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
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


@triton.jit
def choose_row_kernel(
    logits_ptr,  # [n, vocab]
    temperature_ptr,  # float32 [n / REPEAT], as the next four: see `SamplingBatch`
    top_k_ptr,  # int64
    top_p_ptr,  # float32
    min_p_ptr,  # float32
    keys_ptr,  # int64, two each
    position_ptr,  # int64 [n]
    best_ptr,  # float64 [n, blocks]
    token_ptr,  # int32 [n, blocks]
    out_ptr,  # int64 [n]
    logits_stride,
    vocab,
    blocks,
    REPEAT: tl.constexpr,  # as for `choose_block_kernel`
    AHEAD: tl.constexpr,
    BLOCKS: tl.constexpr,  # at least blocks
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,  # scores at a time
    ASM: tl.constexpr,
):
    """The best of a row's tokens that its cuts leave.

    The best of all is it, unless a cut takes it: that takes all that are not likelier, too, so the
    best of the others comes next. Nothing is sorted, and nothing is searched for top_p: a token is
    kept if those above it have less than top_p of the mass.
    """
    row = tl.program_id(0).to(tl.int64)
    token = _best_token(best_ptr + row * blocks, token_ptr + row * blocks, blocks, BLOCKS)
    tl.store(out_ptr + row, token.to(tl.int64))
    params = row // REPEAT
    temperature = tl.load(temperature_ptr + params)
    top_k, top_p = tl.load(top_k_ptr + params), tl.load(top_p_ptr + params)
    min_p = tl.load(min_p_ptr + params)
    if (temperature == 0.0) | ((top_k == 0) & (top_p >= 1.0) & (min_p == 0.0)):
        return
    logits_ptr += row * logits_stride
    keys_ptr += 2 * params
    position = tl.load(position_ptr + row) + AHEAD
    lanes = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        some = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + some, mask=some < vocab, other=-float("inf"))
        lanes = tl.maximum(lanes, logits.to(tl.float32))
    largest = tl.max(lanes, axis=0)
    highest = over(largest, temperature)
    kth = tl.full([], -float("inf"), tl.float32)
    if (top_k > 0) & (top_k < vocab):
        kth = over(_kth_largest(logits_ptr, vocab, top_k, largest, lanes, BLOCK), temperature)
    least = tl.maximum(kth, highest + tl.log(min_p))
    looking = tl.full([], True, tl.int1)
    while looking:
        value = over(tl.load(logits_ptr + token), temperature)
        kept = value >= least
        if kept & (top_p < 1.0):
            total, above = _masses(logits_ptr, vocab, temperature, highest, kth, value, BLOCK)
            kept = above < top_p.to(tl.float64) * total
        looking = ~kept
        if looking:
            other = _best_above(
                logits_ptr, vocab, temperature, keys_ptr, position, value, least, FEW, ASM
            )
            looking = other >= 0  # none: the numbers are broken
            token = tl.where(looking, other, token)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def verify_row_kernel(
    chosen_ptr,  # int64 [rows * WIDTH]
    input_ids_ptr,  # int64 [rows, WIDTH]: the token before the drafts, then these
    draft_lens_ptr,  # int32 [rows]
    out_ptr,  # int32 [rows, 1 + WIDTH]: drafts accepted, then what was chosen
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,  # at least WIDTH
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    chosen = tl.load(chosen_ptr + row * WIDTH + place, mask=place < WIDTH, other=-1)
    draft = tl.load(input_ids_ptr + row * WIDTH + place + 1, mask=place + 1 < WIDTH, other=-1)
    # What fills a draft up may be equal to a choice by chance.
    agrees = (draft == chosen) & (place < tl.load(draft_lens_ptr + row))
    accepted = tl.min(tl.where(agrees, PADDED, place), axis=0)
    out = out_ptr + row * (1 + WIDTH)
    tl.store(out, accepted)
    tl.store(out + 1 + place, chosen.to(tl.int32), mask=place < WIDTH)
