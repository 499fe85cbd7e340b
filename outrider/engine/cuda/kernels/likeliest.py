"""The likeliest tokens of paths and their log probabilities, of logits that are read once.

A path's logits may lack a bias by the token before it, a product of low rank, which is added here.
"""

import triton
import triton.language as tl

from outrider.engine.cuda.kernels.noise import rank, rough_scores, unrank

_LOWEST = tl.constexpr(-(2**63))  # below every ranked score


# Other numbers of rows and positions need no compilation.
@triton.jit(do_not_specialize=["paths", "ahead", "shared", "repeat"])
def likeliest_block_kernel(
    logits_ptr,  # [paths / shared, vocab]
    table_ptr,  # [any, RANK]
    before_ptr,  # int64 [paths]: rows of the table
    weight_ptr,  # [vocab, RANK]
    ids_ptr,  # int64 [vocab]: the tokens that the logits are of
    temperature_ptr,  # float32 [paths / repeat]; 0: no noise
    keys_ptr,  # int64 [paths / repeat, 2]
    position_ptr,  # int64 [paths / repeat]
    best_ptr,  # int64 [paths, blocks, COUNT]: ranks of each block's best scores, in order
    sum_ptr,  # float32 [paths, blocks]: of exp(score - best score of the block)
    paths,
    vocab,
    logits_stride,
    ahead,  # a row samples the token this far after its position
    shared,  # adjacent paths with the same logits
    repeat,  # adjacent paths with the same noise
    RANK: tl.constexpr,  # 0: there is no bias
    WITH_IDS: tl.constexpr,  # otherwise all tokens have logits
    COUNT: tl.constexpr,
    PATHS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,  # tokens of a program
    PART: tl.constexpr,  # of RANK that is multiplied at once
    ASM: tl.constexpr,  # on a device, not interpreted
):
    """Find the COUNT best scores, logit plus temperature times noise, of a block of tokens."""
    block = tl.program_id(1)
    path = tl.program_id(0) * PATHS + tl.arange(0, PATHS)
    real = path < paths
    path = tl.where(real, path, 0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    places = (path // shared * logits_stride)[:, None] + at[None, :]
    scores = tl.load(logits_ptr + places, mask=inside[None, :], other=-float("inf")).to(tl.float32)
    if RANK:
        before = tl.load(before_ptr + path)
        bias = tl.zeros([PATHS, BLOCK], dtype=tl.float32)
        for start in tl.static_range(0, RANK, PART):
            part = start + tl.arange(0, PART)
            x = tl.load(
                table_ptr + before[:, None] * RANK + part[None, :],
                mask=part[None, :] < RANK,
                other=0.0,
            )
            weight = tl.load(
                weight_ptr + at[None, :].to(tl.int64) * RANK + part[:, None],
                mask=inside[None, :] & (part[:, None] < RANK),
                other=0.0,
            )
            if not ASM:  # the interpreter multiplies the bits of bfloat16
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            bias = tl.dot(x, weight, bias, input_precision="ieee")
        scores += bias
    row = path // repeat
    temperature = tl.load(temperature_ptr + row)
    if tl.max(temperature, axis=0) > 0.0:
        token = at
        if WITH_IDS:
            token = tl.load(ids_ptr + at, mask=inside, other=0)
        position = tl.load(position_ptr + row) + ahead
        warm = tl.where(temperature > 0.0, temperature, 1.0)[:, None]
        keys = keys_ptr + 2 * row[:, None]
        noised = rough_scores(scores, warm, keys, position[:, None], token[None, :], ASM)
        noised = tl.where(inside[None, :], warm * noised, -float("inf"))
        scores = tl.where(temperature[:, None] > 0.0, noised, scores)
    out = path * tl.num_programs(1) + block
    best = tl.max(scores, axis=1)
    floor = tl.where(best > -float("inf"), best, 0.0)
    tl.store(sum_ptr + out, tl.sum(tl.exp(scores - floor[:, None]), axis=1), mask=real)
    ranked = tl.where(inside[None, :], rank(scores, at[None, :]), _LOWEST)
    for i in tl.static_range(COUNT):
        first = tl.max(ranked, axis=1)
        tl.store(best_ptr + out * COUNT + i, first, mask=real)
        ranked = tl.where(ranked == first[:, None], _LOWEST, ranked)


@triton.jit
def likeliest_row_kernel(
    best_ptr,  # int64 [paths, blocks, COUNT], ranked
    sum_ptr,  # float32 [paths, blocks]
    ids_ptr,  # int64 [vocab]
    out_ptr,  # int64 [paths, COUNT]: tokens, best first
    chance_ptr,  # float32 [paths, COUNT]: their log probabilities
    blocks,
    vocab,
    WITH_IDS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,  # at least blocks
    SCORES: tl.constexpr,  # at least blocks * COUNT
):
    """Merge the blocks of a path."""
    path = tl.program_id(0).to(tl.int64)
    block, place = tl.arange(0, BLOCKS), tl.arange(0, SCORES)
    some = block < blocks
    first = tl.load(best_ptr + (path * blocks + block) * COUNT, mask=some, other=_LOWEST)
    peaks, _ = unrank(first)
    peaks = tl.where(some, peaks, -float("inf"))
    peak = tl.max(peaks, axis=0)
    sums = tl.load(sum_ptr + path * blocks + block, mask=some, other=0.0)
    total = tl.sum(tl.where(peaks > -float("inf"), sums * tl.exp(peaks - peak), 0.0), axis=0)
    scores = blocks * COUNT
    ranked = tl.load(best_ptr + path * scores + place, mask=place < scores, other=_LOWEST)
    for i in tl.static_range(COUNT):
        best = tl.max(ranked, axis=0)
        score, token = unrank(best)
        there = best != _LOWEST
        token = tl.where(there, token, vocab - 1).to(tl.int64)
        if WITH_IDS:
            token = tl.load(ids_ptr + token)
        tl.store(out_ptr + path * COUNT + i, token)
        chance = tl.minimum(score - peak - tl.log(total), 0.0)
        tl.store(chance_ptr + path * COUNT + i, tl.where(there, chance, -float("inf")))
        ranked = tl.where(ranked == best, _LOWEST, ranked)
