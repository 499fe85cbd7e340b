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
def top_block_kernel(
    logits_ptr,  # [n, vocab]
    temperature_ptr,  # float32 [n]; 0: greedy
    keys_ptr,  # int64 [n, 2]
    position_ptr,  # int64 [n]
    best_ptr,  # int64 [n, blocks, COUNT]: the ranks of each block's best, in order
    logits_stride,
    vocab,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,  # on a device, not interpreted
):
    """Find the COUNT best scores of a block of the vocabulary."""
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
        score = rough_scores(logits, temperature, keys_ptr + 2 * row, position, token, ASM)
    ranked = tl.where(inside, rank(score, token), _LOWEST)
    at = (row * tl.num_programs(1) + block) * COUNT
    for i in tl.static_range(COUNT):
        best = tl.max(ranked, axis=0)
        tl.store(best_ptr + at + i, best)
        ranked = tl.where(ranked == best, _LOWEST, ranked)


@triton.jit
def top_row_kernel(
    best_ptr,  # int64 [n, scores], ranked
    out_ptr,  # int64 [n, COUNT]: the tokens of the best scores, best first
    gap_ptr,  # float32 [n, COUNT]: their distances from the best
    scores,
    vocab,
    COUNT: tl.constexpr,
    SCORES: tl.constexpr,  # at least scores
):
    """Merge the blocks' best scores of a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SCORES)
    ranked = tl.load(best_ptr + row * scores + place, mask=place < scores, other=_LOWEST)
    first, _ = unrank(tl.max(ranked, axis=0))
    for i in tl.static_range(COUNT):
        best = tl.max(ranked, axis=0)
        score, token = unrank(best)
        there = best != _LOWEST
        tl.store(out_ptr + row * COUNT + i, tl.where(there, token, vocab - 1).to(tl.int64))
        gap = tl.where(score == first, 0.0, first - score)
        tl.store(gap_ptr + row * COUNT + i, tl.where(there, gap, float("inf")))
        ranked = tl.where(ranked == best, _LOWEST, ranked)
