"""Where the nodes of draft trees are, and the walks along them: a program for each row."""

import triton
import triton.language as tl


# Other lengths of contexts need no compilation.
@triton.jit(do_not_specialize=["longest"])
def place_nodes_kernel(
    parents_ptr,  # int64 [rows, any]: of the nodes behind each row's first token
    starts_ptr,  # int32 [rows]: positions of the trees' first level
    cu_seqlens_ptr,  # int32 [rows + 1]
    positions_ptr,  # int64 [num_tokens]
    visible_ptr,  # int64 [num_tokens]: as `TreeMask.visible`
    parents_stride,
    longest,  # position
    COUNT: tl.constexpr,  # nodes of a row at most
    PLACES: tl.constexpr,  # more than COUNT
):
    """Write the position of each token of a row, and the nodes on its path."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)  # 0: the token before all nodes
    is_node = (place > 0) & (place <= COUNT)
    parents = parents_ptr + row * parents_stride + place - 1
    above = tl.load(parents, mask=is_node, other=-1).to(tl.int32) + 1
    bits, level = tl.zeros([PLACES], tl.int64), tl.zeros([PLACES], tl.int64)
    for node in range(COUNT):
        here = place == node + 1
        parent = place == tl.sum(tl.where(here, above, 0), axis=0)
        own = tl.full([], 1, tl.int64) << node
        bits = tl.where(here, tl.sum(tl.where(parent, bits, 0), axis=0) | own, bits)
        level = tl.where(here, tl.sum(tl.where(parent, level, 0), axis=0) + 1, level)
    start = tl.load(cu_seqlens_ptr + row)
    real = (place <= COUNT) & (place < tl.load(cu_seqlens_ptr + row + 1) - start)
    position = tl.load(starts_ptr + row) - 1 + level
    tl.store(positions_ptr + start + place, tl.minimum(position, longest), mask=real)
    tl.store(visible_ptr + start + place, bits, mask=real)


# Another place of the scratch page needs no compilation.
@triton.jit(do_not_specialize=["scratch_slot"])
def walk_kernel(
    parents_ptr,  # int64 [rows, any]
    input_ids_ptr,  # int64 [num_tokens]: per row the token before the nodes, then these
    slots_ptr,  # int64 [num_tokens]
    cu_seqlens_ptr,  # int32 [rows + 1]
    draft_lens_ptr,  # int32 [rows]: a row's nodes
    out_ptr,  # int32 [rows, 2 + COUNT]: the choices after each token, from 1 on; then the result
    source_ptr,  # int64 [rows, COUNT]
    target_ptr,  # int64 [rows, COUNT]
    parents_stride,
    scratch_slot,
    COUNT: tl.constexpr,  # nodes of a row at most
    PLACES: tl.constexpr,  # more than COUNT
):
    """Walk along a row's tree as `walk` in outrider/engine/tree_walk.py."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    start = tl.load(cu_seqlens_ptr + row)
    real = (place > 0) & (place <= tl.load(draft_lens_ptr + row))
    parents = parents_ptr + row * parents_stride + place - 1
    above = tl.load(parents, mask=real, other=-2).to(tl.int32) + 1
    token = tl.load(input_ids_ptr + start + place, mask=real, other=-1).to(tl.int32)
    slot = tl.load(slots_ptr + start + place, mask=real, other=scratch_slot)
    out = out_ptr + row * (2 + COUNT) + 1 + place
    choice = tl.load(out, mask=place <= COUNT, other=-1)
    at = tl.full([], 0, tl.int32)
    accepted = tl.full([], 0, tl.int32)
    chosen, source = choice, slot
    for depth in range(1, COUNT + 1):
        wanted = tl.sum(tl.where(place == at, choice, 0), axis=0)
        follows = (above == at) & (token == wanted) & real
        at = tl.min(tl.where(follows, place, PLACES), axis=0)  # after the end, the end
        reached, here = place == at, (place == depth) & (at < PLACES)
        accepted += (at < PLACES).to(tl.int32)
        chosen = tl.where(here, tl.sum(tl.where(reached, choice, 0), axis=0), chosen)
        source = tl.where(here, tl.sum(tl.where(reached, slot, 0), axis=0), source)
    moved = (place > 0) & (place <= COUNT)
    tl.store(source_ptr + row * COUNT + place - 1, source, mask=moved)
    tl.store(target_ptr + row * COUNT + place - 1, slot, mask=moved)
    tl.store(out, chosen, mask=place <= COUNT)
    tl.store(out_ptr + row * (2 + COUNT), accepted)
