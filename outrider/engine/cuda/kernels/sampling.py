"""Coupled sampling without noise in memory: hash, log and argmax in one pass over the logits.

The same integers as `outrider.engine.sampling` in uint32, whose products wrap as the masks there.
"""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= tl.full([], 0x21F0AAAD, tl.uint32)
    x ^= x >> 15
    x *= tl.full([], 0x735A2D97, tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def _noise(keys_ptr, position, token):
    """float64: the noise of some tokens of a row, from two keys."""
    position = position.to(tl.uint32)
    first = _mix(tl.load(keys_ptr).to(tl.uint32) ^ position)
    second = _mix(tl.load(keys_ptr + 1).to(tl.uint32) ^ position)
    mixed = _mix((_mix(token.to(tl.uint32)) ^ first) + second)
    uniform = (mixed.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _scores(logits, temperature, keys_ptr, position, token):
    """float64: logit / temperature + noise of some tokens of a row, from two keys."""
    scaled = tl.math.div_rn(logits.to(tl.float32), temperature)
    return scaled.to(tl.float64) + _noise(keys_ptr, position, token)


@triton.jit
def noised_kernel(
    logits_ptr,  # [n * REPEAT, vocab]
    temperature_ptr,  # float32 [n]; 0: no noise
    keys_ptr,  # int64 [n, 2]
    position_ptr,  # int64 [n]
    out_ptr,  # float32 [n * REPEAT, vocab]
    vocab,
    ahead,  # of its position is what a row draws
    REPEAT: tl.constexpr,  # rows in a row with the same noise
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    scores = tl.load(logits_ptr + row * vocab + token, mask=inside, other=0.0).to(tl.float32)
    temperature = tl.load(temperature_ptr + row // REPEAT)
    if temperature != 0.0:
        position = tl.load(position_ptr + row // REPEAT) + ahead
        noise = _noise(keys_ptr + 2 * (row // REPEAT), position, token)
        scores += temperature * noise.to(tl.float32)
    tl.store(out_ptr + row * vocab + token, scores, mask=inside)


@triton.jit
def choose_block_kernel(
    logits_ptr,  # [n, vocab]
    temperature_ptr,  # float32 [n / REPEAT]; 0: greedy
    keys_ptr,  # int64 [n / REPEAT, 2]
    position_ptr,  # int64 [n]
    best_ptr,  # float64 [n, blocks]: the best score of each block
    token_ptr,  # int32 [n, blocks]: and the lowest token that has it
    logits_stride,
    vocab,
    REPEAT: tl.constexpr,  # rows in a row with the same temperature and keys
    AHEAD: tl.constexpr,  # of its position is what a row draws
    BLOCK: tl.constexpr,
    PART: tl.constexpr,  # of a block: noise is made for so many tokens at once
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    logits_ptr += row * logits_stride
    temperature = tl.load(temperature_ptr + row // REPEAT)
    # Whatever the scores are, even NaN, the token exists.
    if temperature == 0.0:  # nothing but reading: all at once
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        logits = tl.load(logits_ptr + token, mask=inside, other=-float("inf"))
        highest = tl.max(logits, axis=0)
        lowest = tl.min(tl.where((logits == highest) & inside, token, vocab - 1), axis=0)
        best = highest.to(tl.float64)
    else:
        keys_ptr += 2 * (row // REPEAT)
        position = tl.load(position_ptr + row) + AHEAD
        best = tl.full([], -float("inf"), tl.float64)
        lowest = tl.full([], 0, tl.int32) + vocab - 1
        for part in range(BLOCK // PART):
            token = block * BLOCK + part * PART + tl.arange(0, PART)
            inside = token < vocab
            logits = tl.load(logits_ptr + token, mask=inside, other=-float("inf"))
            score = _scores(logits, temperature, keys_ptr, position, token)
            best_here = tl.max(score, axis=0)
            here = tl.min(tl.where((score == best_here) & inside, token, vocab - 1), axis=0)
            lowest = tl.where(best_here > best, here, lowest)
            best = tl.maximum(best, best_here)
    at = row * tl.num_programs(1) + block
    tl.store(best_ptr + at, best)
    tl.store(token_ptr + at, lowest)


@triton.jit
def _best_token(best_ptr, token_ptr, at, inside, AXIS: tl.constexpr):
    """int32: the lowest of the tokens with the best score among those `inside`, along an axis."""
    best = tl.load(best_ptr + at, mask=inside, other=-float("inf"))
    token = tl.load(token_ptr + at, mask=inside, other=2147483647)
    equal = (best == tl.max(best, axis=AXIS, keep_dims=True)) & inside
    # If the best is NaN, which equals nothing, the last.
    last = tl.max(tl.where(inside, token, 0), axis=AXIS, keep_dims=True)
    return tl.min(tl.where(equal, token, last), axis=AXIS)


@triton.jit
def choose_row_kernel(
    best_ptr,  # float64 [n, blocks]
    token_ptr,  # int32 [n, blocks]
    out_ptr,  # int64 [n]
    blocks,
    BLOCKS: tl.constexpr,  # at least blocks
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    chosen = _best_token(best_ptr, token_ptr, row * blocks + block, block < blocks, 0)
    tl.store(out_ptr + row, chosen.to(tl.int64))


@triton.jit
def verify_row_kernel(
    best_ptr,  # float64 [rows * WIDTH, blocks]
    token_ptr,  # int32 [rows * WIDTH, blocks]
    input_ids_ptr,  # int64 [rows, WIDTH]: the token before the drafts, then these
    draft_lens_ptr,  # int32 [rows]
    out_ptr,  # int32 [rows, 1 + WIDTH]: drafts accepted, then what was chosen
    blocks,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,  # at least WIDTH
    BLOCKS: tl.constexpr,  # at least blocks
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    block = tl.arange(0, BLOCKS)
    at = (row * WIDTH + place)[:, None] * blocks + block[None, :]
    inside = (place < WIDTH)[:, None] & (block < blocks)[None, :]
    chosen = _best_token(best_ptr, token_ptr, at, inside, 1)
    draft = tl.load(input_ids_ptr + row * WIDTH + place + 1, mask=place + 1 < WIDTH, other=-1)
    # What fills a draft up may be equal to a choice by chance.
    agrees = (draft == chosen) & (place < tl.load(draft_lens_ptr + row))
    accepted = tl.min(tl.where(agrees, PADDED, place), axis=0)
    out = out_ptr + row * (1 + WIDTH)
    tl.store(out, accepted)
    tl.store(out + 1 + place, chosen, mask=place < WIDTH)


@triton.jit
def top_block_kernel(
    logits_ptr,  # [n, vocab]
    temperature_ptr,  # float32 [n]; 0: greedy
    keys_ptr,  # int64 [n, 2]
    position_ptr,  # int64 [n]
    best_ptr,  # float64 [n, blocks, COUNT]: the best scores of each block, in order
    token_ptr,  # int32 [n, blocks, COUNT]: and their tokens, of equals the lowest first
    logits_stride,
    vocab,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=-float("inf"))
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        score = logits.to(tl.float64)
    else:
        position = tl.load(position_ptr + row)
        score = _scores(logits, temperature, keys_ptr + 2 * row, position, token)
    at = (row * tl.num_programs(1) + block) * COUNT
    for i in tl.static_range(COUNT):
        best = tl.max(score, axis=0)
        lowest = tl.min(tl.where((score == best) & inside, token, vocab - 1), axis=0)
        tl.store(best_ptr + at + i, best)
        tl.store(token_ptr + at + i, lowest)
        score = tl.where(token == lowest, -float("inf"), score)


@triton.jit
def top_row_kernel(
    best_ptr,  # float64 [n, scores]
    token_ptr,  # int32 [n, scores]
    out_ptr,  # int64 [n, COUNT]: the tokens of the best scores, best first
    gap_ptr,  # float32 [n, COUNT]: how far they are from the best
    scores,
    COUNT: tl.constexpr,
    SCORES: tl.constexpr,  # at least scores
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SCORES)
    inside = place < scores
    score = tl.load(best_ptr + row * scores + place, mask=inside, other=-float("inf"))
    token = tl.load(token_ptr + row * scores + place, mask=inside, other=2147483647)
    last = tl.max(tl.where(inside, token, 0), axis=0)  # if the best is NaN, which equals nothing
    first = tl.max(score, axis=0)
    for i in tl.static_range(COUNT):
        best = tl.max(score, axis=0)
        lowest = tl.min(tl.where((score == best) & inside, token, last), axis=0)
        tl.store(out_ptr + row * COUNT + i, lowest.to(tl.int64))
        tl.store(gap_ptr + row * COUNT + i, tl.where(best == first, 0.0, first - best))
        score = tl.where(token == lowest, -float("inf"), score)
