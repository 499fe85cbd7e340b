"""Coupled sampling without noise in memory: hash, log and argmax in one pass over the logits.

The same integers as `outrider.engine.sampling` in uint32, whose products wrap as the masks there.
Two logarithms of a float64 for every token of the vocabulary take as long as a layer's products;
so the noise is made in float32, and in float64 only of what comes close to the best.
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(2**63))  # below every ranked score
_LN2 = tl.constexpr(0.6931471805599453)
# A rough score that is less than this below the best, or than this share of it, may be the best.
_NEAR, _NEAR_SHARE = tl.constexpr(1e-3), tl.constexpr(2**-20)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= tl.full([], 0x21F0AAAD, tl.uint32)
    x ^= x >> 15
    x *= tl.full([], 0x735A2D97, tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def _hash(keys_ptr, position, token):
    """uint32, of two keys."""
    position = position.to(tl.uint32)
    first = _mix(tl.load(keys_ptr).to(tl.uint32) ^ position)
    second = _mix(tl.load(keys_ptr + 1).to(tl.uint32) ^ position)
    return _mix((_mix(token.to(tl.uint32)) ^ first) + second)


@triton.jit
def _noise(keys_ptr, position, token):
    """float64: the noise of some tokens of a row."""
    uniform = (_hash(keys_ptr, position, token).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _scores(logits, temperature, keys_ptr, position, token):
    """float64: logit / temperature + noise of some tokens of a row."""
    scaled = tl.math.div_rn(logits.to(tl.float32), temperature)
    return scaled.to(tl.float64) + _noise(keys_ptr, position, token)


@triton.jit
def _log2(x, ASM: tl.constexpr):
    """float32, in one instruction: wrong by 2^-22 at most, or by that share where it is larger."""
    if not ASM:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _rough_scores(logits, temperature, keys_ptr, position, token, ASM: tl.constexpr):
    """float32: as `_scores`, but for some 1e-6 of noise and the rounding of sums; much faster.

    A uniform close to 1 is known by its distance x from it, and its logarithm by the series in x.
    """
    hashed = _hash(keys_ptr, position, token)
    low = hashed < 2147483648
    x = (tl.where(low, hashed, 4294967295 - hashed).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    series = 1.0 / 4 + x * (1.0 / 5 + x * (1.0 / 6))
    series = x * (1.0 + x * (1.0 / 2 + x * (1.0 / 3 + x * series)))
    exponential = -_LN2 * _log2(tl.where(low, x, 1.0 - x), ASM)
    exponential = tl.where(low | (x > 0.0625), exponential, series)
    return logits.to(tl.float32) / temperature - _LN2 * _log2(exponential, ASM)


@triton.jit
def _ranked(score, token):
    """int64: float32 scores in their order, of equals the lowest token's highest."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - token)


@triton.jit
def _unranked(ranked):
    """The score and the token."""
    bits = (ranked >> 32).to(tl.int32)
    score = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return score, 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


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
    ASM: tl.constexpr,  # on a device, not interpreted
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    logits_ptr += row * logits_stride
    temperature = tl.load(temperature_ptr + row // REPEAT)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logits = tl.load(logits_ptr + token, mask=inside, other=-float("inf"))
    # Whatever the scores are, even NaN, the token exists.
    if temperature == 0.0:
        highest = tl.max(logits, axis=0)
        lowest = tl.min(tl.where((logits == highest) & inside, token, vocab - 1), axis=0)
        best = highest.to(tl.float64)
    else:
        keys_ptr += 2 * (row // REPEAT)
        position = tl.load(position_ptr + row) + AHEAD
        rough = _rough_scores(logits, temperature, keys_ptr, position, token, ASM)
        rough = tl.where(inside, rough, -float("inf"))
        first = tl.max(rough, axis=0)
        near = first - _NEAR - _NEAR_SHARE * tl.minimum(tl.abs(first), 3e38)
        best = tl.full([], -float("inf"), tl.float64)
        lowest = tl.full([], 0, tl.int32) + vocab - 1
        while (first >= near) & (first > -float("inf")):  # nearly always once
            one = tl.min(tl.where(rough == first, token, vocab - 1), axis=0)
            score = _scores(tl.load(logits_ptr + one), temperature, keys_ptr, position, one)
            better = (score > best) | ((score == best) & (one < lowest))
            lowest = tl.where(better, one, lowest)
            best = tl.where(better, score, best)
            rough = tl.where(token == one, -float("inf"), rough)
            first = tl.max(rough, axis=0)
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
    best_ptr,  # int64 [n, blocks, COUNT]: each block's best, ranked, in order
    logits_stride,
    vocab,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,  # on a device, not interpreted
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=-float("inf"))
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        score = logits.to(tl.float32)
    else:
        position = tl.load(position_ptr + row)
        score = _rough_scores(logits, temperature, keys_ptr + 2 * row, position, token, ASM)
    ranked = tl.where(inside, _ranked(score, token), _LOWEST)
    at = (row * tl.num_programs(1) + block) * COUNT
    for i in tl.static_range(COUNT):
        best = tl.max(ranked, axis=0)
        tl.store(best_ptr + at + i, best)
        ranked = tl.where(ranked == best, _LOWEST, ranked)


@triton.jit
def top_row_kernel(
    best_ptr,  # int64 [n, scores], ranked
    out_ptr,  # int64 [n, COUNT]: the tokens of the best scores, best first
    gap_ptr,  # float32 [n, COUNT]: how far they are from the best
    scores,
    vocab,
    COUNT: tl.constexpr,
    SCORES: tl.constexpr,  # at least scores
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SCORES)
    ranked = tl.load(best_ptr + row * scores + place, mask=place < scores, other=_LOWEST)
    first, _ = _unranked(tl.max(ranked, axis=0))
    for i in tl.static_range(COUNT):
        best = tl.max(ranked, axis=0)
        score, token = _unranked(best)
        there = best != _LOWEST
        tl.store(out_ptr + row * COUNT + i, tl.where(there, token, vocab - 1).to(tl.int64))
        gap = tl.where(score == first, 0.0, first - score)
        tl.store(gap_ptr + row * COUNT + i, tl.where(there, gap, float("inf")))
        ranked = tl.where(ranked == best, _LOWEST, ranked)
