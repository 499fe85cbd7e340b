"""Beams of paths, and the best nodes of a tree: a program for each row."""

import triton
import triton.language as tl

from outrider.engine.cuda.kernels.noise import rank, unrank

_LOWEST = tl.constexpr(-(2**63))  # below every ranked score


# Other numbers of nodes need no compilation.
@triton.jit(do_not_specialize=["num_nodes"])
def beam_kernel(
    score_ptr,  # float32 [n, PATHS]: log probabilities of the paths
    node_ptr,  # int64 [n, PATHS]: their last nodes
    found_ptr,  # int64 [n, PATHS, COUNT]: tokens that follow
    chance_ptr,  # float32 [n, PATHS, COUNT]: their log probabilities
    next_token_ptr,  # int64 [n, WIDTH]: what the best continuations end with
    next_score_ptr,  # float32 [n, WIDTH]
    next_node_ptr,  # int64 [n, WIDTH]
    source_ptr,  # int64 [n, WIDTH]: the paths before, of all rows
    new_ptr,  # int32 [n, 3, PATHS * COUNT]: tokens, parents and scores of all
    num_nodes,  # before
    PATHS: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    CELLS: tl.constexpr,  # at least PATHS * COUNT
):
    """Keep all continuations of a row's paths as nodes, and go on with the best."""
    row = tl.program_id(0).to(tl.int64)
    cells: tl.constexpr = PATHS * COUNT
    cell = tl.arange(0, CELLS)
    inside = cell < cells
    path = row * PATHS + cell // COUNT
    token = tl.load(found_ptr + row * cells + cell, mask=inside, other=0)
    chance = tl.load(chance_ptr + row * cells + cell, mask=inside, other=0.0)
    score = tl.load(score_ptr + path, mask=inside, other=0.0) + chance
    parent = tl.load(node_ptr + path, mask=inside, other=0)
    new = new_ptr + row * 3 * cells + cell
    tl.store(new, token.to(tl.int32), mask=inside)
    tl.store(new + cells, parent.to(tl.int32), mask=inside)
    tl.store(new + 2 * cells, score.to(tl.int32, bitcast=True), mask=inside)
    ranked = tl.where(inside, rank(score, cell), _LOWEST)
    for i in tl.static_range(WIDTH):
        first = tl.max(ranked, axis=0)
        best, at = unrank(first)
        out = row * WIDTH + i
        tl.store(next_token_ptr + out, tl.load(found_ptr + row * cells + at))
        tl.store(next_score_ptr + out, best)
        tl.store(next_node_ptr + out, (at + num_nodes).to(tl.int64))
        tl.store(source_ptr + out, row * PATHS + at // COUNT)
        ranked = tl.where(ranked == first, _LOWEST, ranked)


@triton.jit
def best_nodes_kernel(
    nodes_ptr,  # int32 [n, 3, total]: tokens, parents and scores
    best_ptr,  # int32 [n, 3, COUNT]: the same, of which parents are places
    total,
    COUNT: tl.constexpr,
    PLACES: tl.constexpr,  # at least COUNT
    NODES: tl.constexpr,  # at least total
):
    """Choose the nodes of highest score, best first; no child scores higher than its parent.

    Nodes of score -inf become copies of the first one.
    """
    row = tl.program_id(0).to(tl.int64)
    nodes_ptr += row * 3 * total
    node, place = tl.arange(0, NODES), tl.arange(0, PLACES)
    bits = tl.load(nodes_ptr + 2 * total + node, mask=node < total, other=0)
    ranked = tl.where(node < total, rank(bits.to(tl.float32, bitcast=True), node), _LOWEST)
    chosen = tl.full([PLACES], -2, dtype=tl.int32)  # no node, and no root's parent
    for i in range(COUNT):
        first = tl.max(ranked, axis=0)
        _, at = unrank(first)
        chosen = tl.where(place == i, at, chosen)
        ranked = tl.where(ranked == first, _LOWEST, ranked)
    real = place < COUNT
    score = tl.load(nodes_ptr + chosen + 2 * total, mask=real, other=0)
    never = score.to(tl.float32, bitcast=True) == -float("inf")
    best = tl.sum(tl.where(place == 0, chosen, 0), axis=0)
    at = nodes_ptr + tl.where(never, best, chosen)
    parent = tl.load(at + total, mask=real, other=-1)
    above = tl.sum(tl.where(parent[:, None] == chosen[None, :], place[None, :], 0), axis=1)
    out = best_ptr + row * 3 * COUNT + place
    tl.store(out, tl.load(at, mask=real, other=0), mask=real)
    tl.store(out + COUNT, tl.where(parent < 0, -1, above), mask=real)
    tl.store(out + 2 * COUNT, score, mask=real)
