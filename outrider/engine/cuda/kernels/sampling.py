"""Coupled sampling in one pass over the logits: hash, logarithm and argmax.

Scores are computed in float32, and in float64 only for tokens close to a row's best
(topk_topp.py).
"""

import triton
import triton.language as tl

from outrider.engine.cuda.kernels.noise import rank, rough_scores, unrank

_LOWEST = tl.constexpr(-(2**63))  # below every ranked score


# Other positions need no compilation.
@triton.jit(do_not_specialize=["ahead"])
def choose_block_kernel(
    logits_ptr,  # [n, vocab]
    temperature_ptr,  # float32 [n]; 0: greedy
    keys_ptr,  # int64 [n, 2]
    position_ptr,  # int64 [n]
    best_ptr,  # float32 [n, blocks]: the best score of each block, exact if greedy, else rough
    token_ptr,  # int32 [n, blocks]: the lowest token with it
    logits_stride,
    vocab,
    ahead,  # a row samples the token this far after its position
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,  # on a device, not interpreted
):
    """Find the best score of a block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=-float("inf"))
    scores = logits.to(tl.float32)
    if temperature != 0.0:
        position = tl.load(position_ptr + row) + ahead
        keys_ptr += 2 * row
        scores = rough_scores(logits, temperature, keys_ptr, position, token, ASM)
        scores = tl.where(inside, scores, -float("inf"))
    best = tl.max(scores, axis=0)
    at = row * tl.num_programs(1) + block
    tl.store(best_ptr + at, best)
    # The token exists even if scores are NaN.
    lowest = tl.min(tl.where((scores == best) & inside, token, vocab - 1), axis=0)
    tl.store(token_ptr + at, lowest)


@triton.jit
def _rough(logits_ptr, temperature, keys_ptr, position, token, vocab, ASM: tl.constexpr):
    """Return float32 scores of tokens of a row, -inf behind the last token."""
    logits = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf"))
    score = logits.to(tl.float32)
    if temperature != 0.0:
        score = rough_scores(logits, temperature, keys_ptr, position, token, ASM)
        score = tl.where(token < vocab, score, -float("inf"))
    return score


@triton.jit
def top_parts_kernel(
    logits_ptr,  # [n, vocab]
    temperature_ptr,  # float32 [n]; 0: greedy
    keys_ptr,  # int64 [n, 2]
    position_ptr,  # int64 [n]
    best_ptr,  # float32 [n, blocks * PARTS]: the best score of each part of the vocabulary
    logits_stride,
    vocab,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    ASM: tl.constexpr,  # on a device, not interpreted
):
    """Find the best score of each of PARTS parts of PART tokens."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    token = part[:, None] * PART + tl.arange(0, PART)[None, :]
    temperature, position = tl.load(temperature_ptr + row), tl.load(position_ptr + row)
    logits_ptr += row * logits_stride
    scores = _rough(logits_ptr, temperature, keys_ptr + 2 * row, position, token, vocab, ASM)
    tl.store(best_ptr + row * (tl.num_programs(1) * PARTS) + part, tl.max(scores, axis=1))


@triton.jit
def top_row_kernel(
    logits_ptr,  # [n, vocab]
    temperature_ptr,  # float32 [n]; 0: greedy
    keys_ptr,  # int64 [n, 2]
    position_ptr,  # int64 [n]
    best_ptr,  # float32 [n, any]: the best score of each part of the vocabulary
    out_ptr,  # int64 [n, COUNT]: the tokens of the best scores, best first
    gap_ptr,  # float32 [n, COUNT]: their distances from the best
    logits_stride,
    best_stride,
    vocab,
    COUNT: tl.constexpr,
    COUNTS: tl.constexpr,  # at least COUNT
    PARTS: tl.constexpr,  # at least those of the vocabulary
    PART: tl.constexpr,
    ASM: tl.constexpr,  # on a device, not interpreted
):
    """Find the COUNT best tokens of a row, which lie in the COUNT best parts.

    Any part before that of a token, of an equal best score also one of lower tokens, has a token
    that is better.
    """
    row = tl.program_id(0).to(tl.int64)
    part, number = tl.arange(0, PARTS), tl.arange(0, COUNTS)
    there = part * PART < vocab
    score = tl.load(best_ptr + row * best_stride + part, mask=there, other=0.0)
    ranked = tl.where(there, rank(score, part), _LOWEST)
    chosen = tl.full([COUNTS], 0, tl.int32) + tl.cdiv(vocab, PART)  # behind the last part
    for i in tl.static_range(COUNT):
        best = tl.max(ranked, axis=0)
        _, best_part = unrank(best)
        chosen = tl.where((number == i) & (best != _LOWEST), best_part, chosen)
        ranked = tl.where(ranked == best, _LOWEST, ranked)
    token = chosen[:, None] * PART + tl.arange(0, PART)[None, :]
    temperature, position = tl.load(temperature_ptr + row), tl.load(position_ptr + row)
    logits_ptr += row * logits_stride
    scores = _rough(logits_ptr, temperature, keys_ptr + 2 * row, position, token, vocab, ASM)
    ranks = tl.where(token < vocab, rank(scores, token), _LOWEST)
    first, _ = unrank(tl.max(tl.max(ranks, axis=1), axis=0))
    for i in tl.static_range(COUNT):
        best = tl.max(tl.max(ranks, axis=1), axis=0)
        score, best_token = unrank(best)
        exists = best != _LOWEST
        tl.store(out_ptr + row * COUNT + i, tl.where(exists, best_token, vocab - 1).to(tl.int64))
        gap = tl.where(score == first, 0.0, first - score)
        tl.store(gap_ptr + row * COUNT + i, tl.where(exists, gap, float("inf")))
        ranks = tl.where(ranks == best, _LOWEST, ranks)
