"""Attention over pages, with the keys of a row split among several programs (flash decoding).

A tile holds the query tokens of a row and the query heads that share a key head, so that keys and
values are read once. It may hold adjacent rows that begin with the same pages, too.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.engine.cuda.kernels.pointwise import exponent_of, rotated, scale_of

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _prefetch(starts, LENGTH: tl.constexpr):
    """Prefetch LENGTH numbers from each of the pointers to the L2 cache."""
    per_line: tl.constexpr = 1024 // starts.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    for i in tl.static_range(0, LENGTH, per_line):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(starts + i).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _store_new(
    token,  # int32 [n]
    present,  # bool [n]
    new_ptr,  # [2 * kv_heads, DIM] of the first token
    rope_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    scales_ptr,
    stride,  # from token to token
    kv_head,
    kv_heads,
    FLOAT8: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Rotate new keys, and store them and the new values.

    The program that attends to a slot also fills it, so that no program waits for another.
    """
    token = token.to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)
    swapped = tl.where(column < DIM // 2, column + DIM // 2, column - DIM // 2)
    inside = present[:, None] & (column < DIM)[None, :]
    key_here = new_ptr + token[:, None] * stride + kv_head * DIM
    value_here = key_here + kv_heads * DIM + column[None, :]
    rope = rope_ptr + token[:, None] * (2 * DIM) + column[None, :]
    key = tl.load(key_here + column[None, :], mask=inside, other=0.0)
    partner = tl.load(key_here + swapped[None, :], mask=inside, other=0.0)
    cos = tl.load(rope, mask=inside, other=0.0)
    sin = tl.load(rope + DIM, mask=inside, other=0.0)
    value = tl.load(value_here, mask=inside, other=0.0)
    slot = tl.load(slots_ptr + token, mask=present, other=-1)
    slot_of_head = slot * kv_heads + kv_head
    to = slot_of_head[:, None] * DIM + column[None, :]
    stored = inside & (slot >= 0)[:, None]
    key = rotated(key, partner, cos, sin, key.dtype).to(key.dtype)
    if FLOAT8:
        key, key_exponent = _rounded(key, keys_ptr.dtype.element_ty)
        value, value_exponent = _rounded(value, values_ptr.dtype.element_ty)
        scales = (value_exponent << 23) | (key_exponent << 7)  # two of bfloat16
        tl.store(scales_ptr + slot_of_head, scales, mask=present & (slot >= 0))
    tl.store(keys_ptr + to, key, mask=stored)
    tl.store(values_ptr + to, value, mask=stored)


@triton.jit
def _rounded(vectors, dtype: tl.constexpr):
    """Return vectors [n, DIM] as float8 and their exponents [n], as `fp8.quantise` does."""
    wide = vectors.to(tl.float32)
    exponent = exponent_of(tl.max(tl.abs(wide), axis=1))
    return (wide * scale_of(254 - exponent)[:, None]).to(dtype), exponent


@triton.jit
def _float16(pairs, bytes: tl.constexpr):
    """Return as float16 those float8 of int16 pairs that are the `bytes` of two of them."""
    code: tl.constexpr = (
        "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, 0, "
        + bytes
        + "; mov.b32 {lo, hi}, t; cvt.rn.f16x2.e4m3x2 $0, lo; }"
    )
    return tl.inline_asm_elementwise(code, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _halves(pairs, dtype: tl.constexpr, ASM: tl.constexpr):
    """Return the first and second of each two float8 in int16, as float16 or as `dtype`."""
    if ASM and dtype == tl.float16:
        return _float16(pairs, "0x4420"), _float16(pairs, "0x4431")
    first = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    second = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return first.to(dtype), second.to(dtype)


@triton.jit
def _attend(
    query,  # [BLOCK_M, BLOCK_DIM]; if FLOAT8 over `query_size` [BLOCK_M], if PAIRS its even columns
    odd_query,  # its odd columns, read if PAIRS
    query_size,
    slot,  # int64 [BLOCK_N]: of the keys
    written,  # bool [BLOCK_N], read if MASKED, as the next
    seen,  # bool [BLOCK_M, BLOCK_N]
    highest,  # [BLOCK_M], of the blocks before, as the next two
    total,
    sums,  # if FLOAT8 over `size`, the largest scale of values so far, if PAIRS of even columns
    odd_sums,  # of odd columns, if PAIRS
    size,
    keys_ptr,
    values_ptr,
    scales_ptr,
    kv_head,
    kv_heads,
    scale,
    softcap,
    MASKED: tl.constexpr,  # not all queries see all keys of the block
    FLOAT8: tl.constexpr,
    PAIRS: tl.constexpr,
    ASM: tl.constexpr,  # on a device, not interpreted
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
):
    """Return `highest`, `total`, `sums`, `odd_sums` and `size` after a block of keys.

    No instruction transposes numbers of 8 bits in shared memory. So with PAIRS float8 are read in
    twos, and become a matrix of even columns and one of odd ones.
    """
    per: tl.constexpr = 2 if PAIRS else 1  # numbers read as one
    column = tl.arange(0, BLOCK_DIM // per)
    value_column = tl.arange(0, BLOCK_VALUE_DIM // per)
    slot = slot * kv_heads + kv_head
    if PAIRS:
        keys_ptr = keys_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        values_ptr = values_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    key_at = keys_ptr + slot[None, :] * (DIM // per) + column[:, None]
    value_at = values_ptr + slot[:, None] * (VALUE_DIM // per) + value_column[None, :]
    key_there = (column < DIM // per)[:, None]
    value_there = (value_column < VALUE_DIM // per)[None, :]
    if MASKED:
        key_there &= written[None, :]
        value_there &= written[:, None]
    keys = tl.load(key_at, mask=key_there, other=0.0)
    values = tl.load(value_at, mask=value_there, other=0.0)
    if FLOAT8:
        if MASKED:
            scales = tl.load(scales_ptr + slot, mask=written, other=0)
        else:
            scales = tl.load(scales_ptr + slot)
    if PAIRS:
        keys, odd_keys = _halves(keys, query.dtype, ASM)
        values, odd_values = _halves(values, query.dtype, ASM)
    elif FLOAT8:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    scores = tl.dot(query, keys, input_precision="ieee")
    if PAIRS:
        scores = tl.dot(odd_query, odd_keys, scores, input_precision="ieee")
    if FLOAT8:
        scores *= query_size[:, None] * (scales << 16).to(tl.float32, bitcast=True)[None, :]
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0)  # tanh
        unit = _LOG2E
    else:
        unit = scale * _LOG2E
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * unit)
    base = new_highest
    if MASKED:  # a query that has seen no key yet must not compute inf - inf
        base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weights = tl.exp2(scores * unit - base[:, None])
    fading = tl.exp2(highest - base)
    total = total * fading + tl.sum(weights, axis=1)
    if FLOAT8:
        value_scale = (scales & -65536).to(tl.float32, bitcast=True)
        new_size = tl.maximum(size, tl.max(value_scale, axis=0))
        weights *= (value_scale * _inverse(new_size))[None, :]
        fading *= size * _inverse(new_size)
        size = new_size
    weights = weights.to(values.dtype)
    sums = tl.dot(weights, values, sums * fading[:, None], input_precision="ieee")
    if PAIRS:
        odd_sums = odd_sums * fading[:, None]
        odd_sums = tl.dot(weights, odd_values, odd_sums, input_precision="ieee")
    return new_highest, total, sums, odd_sums, size


@triton.jit
def _load_query(query_here, rope_here, in_row, column, NEW: tl.constexpr, DIM: tl.constexpr):
    """Return some columns of queries, rotated if NEW."""
    there = in_row[:, None] & (column < DIM)[None, :]
    query_here = query_here[:, None]
    query = tl.load(query_here + column[None, :], mask=there, other=0.0)
    if NEW:
        swapped = tl.where(column < DIM // 2, column + DIM // 2, column - DIM // 2)
        rope = rope_here[:, None] + column[None, :]
        partner = tl.load(query_here + swapped[None, :], mask=there, other=0.0)
        cos = tl.load(rope, mask=there, other=0.0)
        sin = tl.load(rope + DIM, mask=there, other=0.0)
        query = rotated(query, partner, cos, sin, query.dtype).to(query.dtype)
    return query


@triton.jit
def _inverse(power):
    """Return the inverse of a power of two."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _slots_of(key, written, table_ptr, PAGE_SIZE: tl.constexpr):
    """Return the slots of keys of one or several rows' page tables."""
    page = tl.load(table_ptr + key // PAGE_SIZE, mask=written, other=0)
    return page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE


@triton.jit
def _slots_of_block(
    block, end, table_ptr, ONE_PAGE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the slots of a block of keys, of which those from `end` on may not exist."""
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if ONE_PAGE:
        page = tl.load(table_ptr + block * BLOCK_N // PAGE_SIZE)
        return page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    return _slots_of(key, key < end, table_ptr, PAGE_SIZE)


@triton.jit
def _row_of_tile(
    nth, cu_seqlens_ptr, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SHORT: tl.constexpr
):
    """Return the row and tile that the nth program attends for, a row's last tile first.

    Rows of at most SHORT queries have no tile. The row is `num_rows` at least if no tile is left.
    """
    row = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int32)  # tiles of rows before `some`, then before `row`
    first = tl.full([], 0, tl.int32)
    for some in range(0, num_rows, 256):
        rows = some + tl.arange(0, 256)
        start = tl.load(cu_seqlens_ptr + rows, mask=rows < num_rows, other=0)
        end = tl.load(cu_seqlens_ptr + rows + 1, mask=rows < num_rows, other=0)
        queries = (end - start) * GROUP
        tiles = tl.where(queries > SHORT, tl.cdiv(queries, BLOCK_M), 0)
        after = before + tl.cumsum(tiles, axis=0)
        row += tl.sum((after <= nth).to(tl.int32), axis=0)
        first = tl.maximum(first, tl.max(tl.where(after <= nth, after, 0), axis=0))
        before += tl.sum(tiles, axis=0)
    return row, nth - first


@triton.jit
def _first_row_of_tile(nth, places_ptr, num_rows, ROWS: tl.constexpr):
    """Return the first row of the nth tile of rows that share pages.

    The row is `num_rows` at least if there are fewer tiles.
    """
    row = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int32)  # tiles that begin before `some`
    for some in range(0, num_rows, 256):
        rows = some + tl.arange(0, 256)
        places = tl.load(places_ptr + rows, mask=rows < num_rows, other=1)
        begins = (places % ROWS == 0).to(tl.int32)
        row += tl.sum((before + tl.cumsum(begins, axis=0) <= nth).to(tl.int32), axis=0)
        before += tl.sum(begins, axis=0)
    return row


# Other numbers of rows, pages or splits need no compilation.
@triton.jit(do_not_specialize=["table_stride", "num_rows", "splits"])
def paged_attention_kernel(
    query_ptr,  # [tokens, kv_heads * GROUP, DIM], tokens query_stride apart. If NEW, they are not
    # rotated yet, and each token's new keys and values follow: [2 * kv_heads, DIM]
    rope_ptr,  # [tokens, 2, DIM]: cosines, then sines; this and slots_ptr are read if NEW
    slots_ptr,  # int64 [tokens]; negative slots are not stored
    keys_ptr,  # [slots, kv_heads, DIM]
    values_ptr,  # [slots, kv_heads, VALUE_DIM]
    scales_ptr,  # int32 [slots, kv_heads]: bits of key's and value's, used if FLOAT8
    table_ptr,  # int32 [rows, max_pages]
    seq_lens_ptr,  # int32 [rows]
    cu_seqlens_ptr,  # int32 [rows + 1]
    sinks_ptr,  # [heads], read if HAS_SINKS
    trees_ptr,  # int32 [rows]; this and the next two are read if HAS_TREES: see `TreeMask`
    visible_ptr,  # int64 [tokens]
    positions_ptr,  # int64 [tokens]
    places_ptr,  # int32 [rows]; this and the next are read if ROWS > 1: see `SharedPrefix`
    shared_ptr,  # int32 [rows]
    out_ptr,  # [tokens, heads, splits, VALUE_DIM]: each split's own average of values
    lse_ptr,  # float32 [tokens, heads, splits]: log2 of its sum of weights, read if SPLIT
    query_stride,
    table_stride,
    num_rows,
    splits,  # programs among which the keys of a tile are divided, read if SPLIT
    window,  # keys a query sees at most, read if HAS_WINDOW
    scale,
    softcap,  # read if HAS_SOFTCAP
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREES: tl.constexpr,
    FLOAT8: tl.constexpr,  # keys and values are stored as `fp8.quantise` rounds them
    PAIRS: tl.constexpr,  # float8 are read in twos, and even columns multiplied apart from odd ones
    ASM: tl.constexpr,  # on a device, not interpreted
    NEW: tl.constexpr,  # this step's keys and values are not in the pages yet. Then there is one
    # tile of queries, VALUE_DIM is DIM, and DIM is even
    BLOCK_NEW: tl.constexpr,  # new keys that are rotated at a time
    ROWS: tl.constexpr,  # at most in a tile, a power of two. If more than 1, all rows have equally
    # many queries, which fit one tile, without window and trees
    SHORT: tl.constexpr,  # if positive, rows of more queries have tiles, which follow one another
    # on the first axis, and the others none. Else a row has one tile, or none if it is too long.
    # If positive, ROWS is 1 and nothing is split
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # at least DIM
    BLOCK_VALUE_DIM: tl.constexpr,  # at least VALUE_DIM
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to the keys of one split, for one tile of queries and one key head.

    It is launched in four ways:

        rows                                    | SHORT | ROWS | NEW    | SPLIT
        each has one tile                       | 0     | 1    | either | if programs are few
        some share pages, and so a tile         | 0     | > 1  | either | if programs are few
        prompts, each with tiles of its own     | > 0   | 1    | no     | no
        short ones beside prompts, which idle   | 0     | 1    | no     | no
    """
    if not SPLIT:
        splits = 1
    split = tl.full([], 0, tl.int32)
    if SPLIT:
        split = tl.program_id(0)
    tile = 0
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    row = tl.program_id(2)
    if SHORT > 0:
        nth = tl.program_id(0)
        row, tile = _row_of_tile(nth, cu_seqlens_ptr, num_rows, GROUP, BLOCK_M, SHORT)
    if ROWS > 1:  # programs without a tile are the last ones, and delay no others
        row = _first_row_of_tile(row, places_ptr, num_rows, ROWS)
    if SHORT > 0 or ROWS > 1:
        idle = row >= num_rows
        row = tl.minimum(row, num_rows - 1)
    start = tl.load(cu_seqlens_ptr + row)
    query_len = tl.load(cu_seqlens_ptr + row + 1) - start
    seq_len = tl.load(seq_lens_ptr + row)
    queries = query_len  # of the tile's rows
    if SHORT > 0:
        tile = tl.cdiv(query_len * GROUP, BLOCK_M) - 1 - tile
    elif ROWS == 1:
        idle = (query_len == 0) | (query_len * GROUP > BLOCK_M)
    if ROWS > 1:
        # The rows from here on that belong to one run of shared pages.
        nth = tl.arange(0, ROWS)
        exists = row + nth < num_rows
        first_place = tl.load(places_ptr + row)
        joined = tl.load(places_ptr + row + nth, mask=exists, other=-1) == first_place + nth
        lengths = tl.load(seq_lens_ptr + row + nth, mask=joined, other=0)
        pages = tl.load(shared_ptr + row + nth, mask=joined & (nth > 0), other=2**30)
        pages = tl.minimum(pages, tl.where(joined, (lengths - query_len) // PAGE_SIZE, 2**30))
        shared = tl.min(pages, axis=0) * PAGE_SIZE  # keys
        own = tl.max(lengths, axis=0) - shared
        rows = tl.sum(joined.to(tl.int32), axis=0)
        queries = rows * query_len

    # Blocks of keys that some query of the tile sees, and this split's share of them.
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
    end = seq_len - query_len + last + 1
    if ROWS > 1:
        end = shared
    first_block = 0
    if HAS_WINDOW:
        first_seen = seq_len - query_len + tile * BLOCK_M // GROUP - window + 1
        if HAS_TREES:  # a node's position is the tree's first at least
            first_seen = tl.minimum(first_seen, tl.load(trees_ptr + row) - window + 1)
        first_block = tl.maximum(first_seen, 0) // BLOCK_N
    share = tl.cdiv(tl.cdiv(end, BLOCK_N) - first_block, splits)
    from_block = first_block + split * share
    to_block = tl.minimum(from_block + share, tl.cdiv(end, BLOCK_N))

    if PDL:
        # Most keys were there before the first layer, so they can be fetched while the kernel
        # before still runs. A line fetched too early does no harm.
        gdc_launch_dependents()
        if (from_block < to_block) & ~idle:
            early = from_block * BLOCK_N + tl.arange(0, BLOCK_N)
            early = tl.minimum(early, end - 1)
            page = tl.load(table_ptr + row * table_stride + early // PAGE_SIZE)
            slot = (page.to(tl.int64) * PAGE_SIZE + early % PAGE_SIZE) * kv_heads + kv_head
            _prefetch(keys_ptr + slot * DIM, DIM)
            _prefetch(values_ptr + slot * VALUE_DIM, VALUE_DIM)
        gdc_wait()
    if idle:
        return

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = m < queries * GROUP
    token = (start + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    place = seq_len - query_len + m // GROUP  # among the row's slots
    if ROWS > 1:
        owner = m // GROUP // query_len
        place = tl.load(seq_lens_ptr + row + owner, mask=in_row, other=0)
        place += m // GROUP % query_len - query_len
    position = place
    if HAS_TREES:
        tree = tl.load(trees_ptr + row)
        visible = tl.load(visible_ptr + token, mask=in_row, other=0)
        if HAS_WINDOW:
            position = tl.load(positions_ptr + token, mask=in_row, other=0).to(tl.int32)
    per: tl.constexpr = 2 if PAIRS else 1
    column = tl.arange(0, BLOCK_DIM // per) * per
    if NEW:
        # The new keys in this split's blocks; those of joined rows are all in the last split.
        old = seq_len - query_len
        first_new = tl.maximum(from_block * BLOCK_N - old, 0)
        num_new = tl.minimum(to_block * BLOCK_N, seq_len) - old
        if ROWS > 1:
            first_new = 0
            num_new = queries * (split == splits - 1)
        for some in range(first_new, num_new, BLOCK_NEW):
            new = some + tl.arange(0, BLOCK_NEW)
            _store_new(
                start + new,
                new < num_new,
                query_ptr + kv_heads * GROUP * DIM,
                *(rope_ptr, slots_ptr, keys_ptr, values_ptr, scales_ptr),
                *(query_stride, kv_head, kv_heads),
                *(FLOAT8, DIM, BLOCK_DIM),
            )
    query_here = query_ptr + token * query_stride + head * DIM
    rope_here = rope_ptr + token * (2 * DIM)
    query = _load_query(query_here, rope_here, in_row, column, NEW, DIM)
    odd_query = query
    if PAIRS:
        odd_query = _load_query(query_here, rope_here, in_row, column + 1, NEW, DIM)
    if NEW:
        tl.debug_barrier()  # threads load what others have stored

    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)  # in units of log2
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # one more key in the first split, without a value
        sink = tl.load(sinks_ptr + head, mask=in_row, other=0.0).to(tl.float32)
        highest = tl.where(split == 0, sink * _LOG2E, highest)
        total = tl.where(split == 0, 1.0, total)
    sums = tl.zeros([BLOCK_M, BLOCK_VALUE_DIM // per], tl.float32)
    odd_sums = tl.zeros([BLOCK_M, BLOCK_VALUE_DIM // per if PAIRS else 1], tl.float32)
    size = tl.full([], 2.0**-126, tl.float32)
    query_size = tl.full([BLOCK_M], 1.0, tl.float32)
    if FLOAT8 and query.dtype == tl.bfloat16:
        # Float8 becomes float16 in one instruction, and bfloat16 in several slow ones.
        query = query.to(tl.float32)
        odd_query = odd_query.to(tl.float32)
        bits = tl.max(tl.maximum(tl.abs(query), tl.abs(odd_query)), axis=1)
        bits = bits.to(tl.int32, bitcast=True) & 0x7F800000
        query_size = tl.maximum(bits, 0x00800000).to(tl.float32, bitcast=True)
        query = (query * _inverse(query_size)[:, None]).to(tl.float16)
        odd_query = (odd_query * _inverse(query_size)[:, None]).to(tl.float16)
    tile_queries = (query, odd_query, query_size)
    layer = (keys_ptr, values_ptr, scales_ptr, kv_head, kv_heads, scale, softcap)
    table = table_ptr + row * table_stride
    one_page: tl.constexpr = SHORT > 0 and PAGE_SIZE % BLOCK_N == 0
    unmasked: tl.constexpr = SHORT > 0 and not HAS_WINDOW
    from_masked = from_block
    if unmasked:
        # The first query sees all keys of the blocks before.
        first_end = seq_len - query_len + tile * BLOCK_M // GROUP + 1
        if HAS_TREES:
            first_end = tl.minimum(first_end, tree)
        from_masked = tl.maximum(first_end // BLOCK_N, from_block)
        for block in tl.range(from_block, from_masked, num_stages=STAGES):
            highest, total, sums, odd_sums, size = _attend(
                *tile_queries,
                _slots_of_block(block, end, table, one_page, PAGE_SIZE, BLOCK_N),
                *(None, None),
                *(highest, total, sums, odd_sums, size),
                *layer,
                False,
                *(FLOAT8, PAIRS, ASM, DIM, VALUE_DIM, HAS_SOFTCAP, BLOCK_DIM, BLOCK_VALUE_DIM),
            )
    for block in tl.range(from_masked, to_block, num_stages=1 if unmasked else STAGES):
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = key[None, :] <= place[:, None]
        if ROWS > 1:
            seen &= (key < end)[None, :]
        if HAS_WINDOW:
            seen &= key[None, :] > position[:, None] - window
        if HAS_TREES:
            node = key - tree
            bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
            related = ((visible[:, None] >> bit[None, :]) & 1) != 0
            # A token sees no slot behind its own, where the bits are clamped.
            within = (node >= 0)[None, :] & (key[None, :] <= place[:, None])
            seen = (seen & (node < 0)[None, :]) | (related & within)
        highest, total, sums, odd_sums, size = _attend(
            *tile_queries,
            _slots_of_block(block, end, table, one_page, PAGE_SIZE, BLOCK_N),
            *(key < end, seen),
            *(highest, total, sums, odd_sums, size),
            *layer,
            True,
            *(FLOAT8, PAIRS, ASM, DIM, VALUE_DIM, HAS_SOFTCAP, BLOCK_DIM, BLOCK_VALUE_DIM),
        )
    if ROWS > 1:
        # The keys that rows do not share, row after row, each as long as the longest.
        for some in range(0, rows * own * (split == splits - 1), BLOCK_N):
            at = some + tl.arange(0, BLOCK_N)
            one = at // own
            key = shared + at % own
            length = tl.load(seq_lens_ptr + row + one, mask=one < rows, other=0)
            seen = (one[None, :] == owner[:, None]) & (key[None, :] <= place[:, None])
            highest, total, sums, odd_sums, size = _attend(
                *tile_queries,
                _slots_of(key, key < length, table + one * table_stride, PAGE_SIZE),
                *(key < length, seen),
                *(highest, total, sums, odd_sums, size),
                *layer,
                True,
                *(FLOAT8, PAIRS, ASM, DIM, VALUE_DIM, HAS_SOFTCAP, BLOCK_DIM, BLOCK_VALUE_DIM),
            )

    at = (token * kv_heads * GROUP + head) * splits + split
    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    value_column = tl.arange(0, BLOCK_VALUE_DIM // per) * per
    to = out_ptr + at[:, None] * VALUE_DIM + value_column[None, :]
    stored = in_row[:, None] & (value_column < VALUE_DIM)[None, :]
    if FLOAT8:
        sums *= size
    if PAIRS:
        tl.store(to + 1, odd_sums * size / divisor, mask=stored)
    tl.store(to, sums / divisor, mask=stored)
    if SPLIT:
        lse = tl.where(total == 0.0, -float("inf"), highest + tl.log2(total))
        tl.store(lse_ptr + at, lse, mask=in_row)


@triton.jit
def combine_splits_kernel(
    partial_ptr,  # float32 [tokens * heads, SPLITS, VALUE_DIM]
    lse_ptr,  # float32 [tokens * heads, SPLITS]
    out_ptr,  # [tokens * heads, VALUE_DIM]
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Average the values of the splits by their sums of weights."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_VALUE_DIM)
    lse = tl.load(lse_ptr + at * SPLITS + split)
    highest = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(highest == -float("inf"), 0.0, highest))
    partial = tl.load(
        partial_ptr + (at * SPLITS + split[:, None]) * VALUE_DIM + column[None, :],
        mask=(lse > -float("inf"))[:, None] & (column < VALUE_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weight, axis=0)
    average = tl.sum(partial * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + at * VALUE_DIM + column, average, mask=column < VALUE_DIM)
