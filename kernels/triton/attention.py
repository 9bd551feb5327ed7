"""The Triton kernel of attention, which walks the keys of work items; ``merge`` has the other.

Flash attention over pages (Dao et al. 2022, Kwon et al. 2023): an online softmax in float32, in
powers of two, over tiles of keys that are found through the page table. A program takes one work
item of ``schedule.items`` for one KV head. Its queries are rows of the batch times the query heads
of that KV head, packed as one matrix, so that decoding too runs on tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coppice.kernels.triton.dependent import begin

#: Columns of ``schedule.items.Launch.items``.
ITEM_FIELDS = tl.constexpr(8)


@triton.jit
def _load_part(
    base: tl.tensor,
    at: tl.tensor,
    real: tl.tensor,
    FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
    WIDENED: tl.constexpr = False,
) -> tl.tensor:
    """Elements ``FIRST .. FIRST + BLOCK`` of the rows that begin at ``at``, in DTYPE or float32.

    Rows that are not ``real``, and elements past HEAD_DIM, are 0. UPCAST: in float32. WIDENED:
    8-bit floats as float16; UPCAST then says that no assembler is at hand.
    """
    d = FIRST + tl.arange(0, BLOCK)
    there = real[:, None]
    if FIRST + BLOCK > HEAD_DIM:
        there = there & (d < HEAD_DIM)[None, :]
    part = tl.load(base + at[:, None] + d[None, :], mask=there, other=0.0)
    if WIDENED:
        if UPCAST:
            return part.to(tl.float16)
        # What the compiler makes of `to`, but an operation that it does not move. It would convert
        # after shared memory, from which each warp then reads 8-bit floats one by one.
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [part],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    return part.to(tl.float32 if UPCAST else DTYPE)


@triton.jit
def _store_part(
    base: tl.tensor,
    at: tl.tensor,
    part: tl.tensor,
    real: tl.tensor,
    FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The reverse of ``_load_part``."""
    d = FIRST + tl.arange(0, BLOCK)
    there = real[:, None]
    if FIRST + BLOCK > HEAD_DIM:
        there = there & (d < HEAD_DIM)[None, :]
    tl.store(base + at[:, None] + d[None, :], part.to(base.dtype.element_ty), mask=there)


@triton.jit
def _walk(
    accumulator: tl.tensor,
    rest: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    q_rest: tl.tensor,
    position: tl.tensor,
    fork: tl.tensor,
    bits: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    tiles: tl.tensor,
    gap_at: tl.tensor,
    gap: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    bend: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    BRANCHED: tl.constexpr,
    MASKED: tl.constexpr,
    LIFT: tl.constexpr,
    HALF: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """``tiles`` tiles of keys from ``first`` on, of which the keys in ``begin .. end`` are real.

    BRANCHED: from key ``fork`` on a row sees those of its ``bits``.

    ``scale`` turns scores into powers of two, for each row; ``bend``, if SOFTCAPPED, products into
    what tanh takes. The weights of keys are 2 ** LIFT times what they are without it.

    Before tile number ``gap_at``, ``gap`` keys are left out. ``rest`` and ``q_rest`` are for the
    head's elements after BLOCK_D, if REST_D is above 0.
    """
    # Tiles begin at multiples of KEYS, so that often a key's place in its page is always the same.
    number = tl.arange(0, KEYS)
    within = number % PAGE_SIZE
    start = first
    if MASKED:
        start += tl.where(gap_at == 0, gap, 0)
    real = (start + number >= begin) & (start + number < end)
    # Pages are looked up a tile ahead: in the tile itself the loads of keys would wait for them.
    page = tl.load(table + (start + number) // PAGE_SIZE, mask=real, other=0)
    for tile in range(tiles):
        start = first + tile * KEYS
        if MASKED:
            start += tl.where(tile >= gap_at, gap, 0)
        key = start + number
        real = (key >= begin) & (key < end)
        if KEYS % PAGE_SIZE:
            within = key % PAGE_SIZE
        at = page.to(tl.int64) * (PAGE_SIZE * KV_HEADS * HEAD_DIM)
        at += (within * KV_HEADS + kv_head) * HEAD_DIM
        start += KEYS
        if MASKED:
            start += tl.where(tile + 1 == gap_at, gap, 0)
        real_next = (start + number >= begin) & (start + number < end)
        page = tl.load(table + (start + number) // PAGE_SIZE, mask=real_next, other=0)
        # Keys that are not real are never read: a page without an owner may hold anything.
        k = _load_part(k_cache, at, real, 0, HEAD_DIM, BLOCK_D, q.dtype, UPCAST, HALF)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST_D:
            k = _load_part(k_cache, at, real, BLOCK_D, HEAD_DIM, REST_D, q.dtype, UPCAST, HALF)
            scores = tl.dot(q_rest, tl.trans(k), scores, input_precision="ieee")
        if SOFTCAPPED:
            # tanh(scores * bend), from powers of two.
            x = scores * bend[:, None]
            small = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x))
            bent = (1.0 - small) / (1.0 + small)
            scores = tl.where(x < 0, -bent, bent)
        if MASKED:
            earlier = key[None, :] <= position[:, None]
            if BRANCHED:
                place = key[None, :] - fork[:, None]
                bit = (bits[:, None] >> tl.minimum(tl.maximum(place, 0), 62).to(tl.int64)) & 1
                earlier = tl.where(place >= 0, bit != 0, earlier)
            seen = real[None, :] & earlier
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        # A row that has seen nothing yet has a peak of -inf, and -inf - -inf is no number.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * scale[:, None] - (base - LIFT)[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        v = _load_part(v_cache, at, real, 0, HEAD_DIM, BLOCK_D, q.dtype, UPCAST, HALF)
        weights = weights.to(v.dtype)
        accumulator = tl.dot(weights, v, accumulator * shrink[:, None], input_precision="ieee")
        if REST_D:
            v = _load_part(v_cache, at, real, BLOCK_D, HEAD_DIM, REST_D, q.dtype, UPCAST, HALF)
            rest = tl.dot(weights, v, rest * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return accumulator, rest, peak, total


@triton.jit
def _attend_item(
    number: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    items: tl.tensor,
    item_rows: tl.tensor,
    item_slots: tl.tensor,
    positions: tl.tensor,
    branches: tl.tensor,
    page_table: tl.tensor,
    q_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    BRANCHED: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    PARTIAL: tl.constexpr,
    PHASED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """The program ``number`` of those that ``attend_items`` describes."""
    parts: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    unit = number % (KV_HEADS * parts)
    item = items + number // (KV_HEADS * parts) * ITEM_FIELDS
    kv_head = unit // parts
    first_row, rows = tl.load(item), tl.load(item + 1)
    table = page_table + tl.load(item + 2)
    begin, end = tl.load(item + 3), tl.load(item + 4)
    clear_begin, clear_end = tl.load(item + 5), tl.load(item + 6)

    m = tl.arange(0, QUERIES)
    local = m // PACKED
    in_group = unit % parts * PACKED + m % PACKED
    valid = (local < rows) & (in_group < GROUP)
    row = tl.load(item_rows + first_row + local, mask=valid, other=0)
    position = tl.load(positions + row)
    fork, bits = position, position
    if BRANCHED:
        fork = tl.load(branches + 2 * row.to(tl.int64)).to(tl.int32)
        bits = tl.load(branches + 2 * row.to(tl.int64) + 1)
    head = kv_head * GROUP + in_group
    q_at = row.to(tl.int64) * q_stride + head * HEAD_DIM
    dtype: tl.constexpr = q.dtype.element_ty
    half: tl.constexpr = HALF or dtype == tl.float16
    # Weights are at most 1, and float16 has few numbers far below that: all of its range is used.
    lift: tl.constexpr = 15.0 if half else 0.0
    queries = _load_part(q, q_at, valid, 0, HEAD_DIM, BLOCK_D, dtype, UPCAST)
    accumulator = tl.full([QUERIES, BLOCK_D], 0.0, tl.float32)
    # Without REST_D these are not used, but have to be defined.
    queries_rest, rest = queries, accumulator
    if REST_D:
        queries_rest = _load_part(q, q_at, valid, BLOCK_D, HEAD_DIM, REST_D, dtype, UPCAST)
        rest = tl.full([QUERIES, REST_D], 0.0, tl.float32)
    if SCALED:
        scale = scale * tl.load(k_scales + kv_head)
    # Above 0, since scores of keys that are not seen, -inf, are multiplied by it.
    by = tl.full([QUERIES], 1.0, tl.float32) * tl.maximum(scale, 1e-30)
    if HALF:
        # The products are those of float16, to which 8-bit floats are converted four times faster
        # than to bfloat16. Queries of any size fit: a row is multiplied by a power of two.
        high = tl.max(tl.abs(queries.to(tl.float32)), 1)
        if REST_D:
            high = tl.maximum(high, tl.max(tl.abs(queries_rest.to(tl.float32)), 1))
        power = tl.maximum(high.to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23)
        power = power.to(tl.float32, bitcast=True)
        up = 16384.0 / power  # the largest of a row is then less than 2 ** 15
        queries = (queries.to(tl.float32) * up[:, None]).to(tl.float16)
        if REST_D:
            queries_rest = (queries_rest.to(tl.float32) * up[:, None]).to(tl.float16)
        by = by * (power / 16384.0)
    bend = by
    if SOFTCAPPED:
        bend = by / softcap
        by = tl.full([QUERIES], 1.0, tl.float32) * softcap
    by = by * 1.4426950408889634

    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.full([QUERIES], 0.0, tl.float32)
    # Tiles lie at multiples of KEYS in the sequence, wherever the item begins: the order in which a
    # row adds up does not depend on the other rows of the item.
    first = begin // KEYS * KEYS
    tiles = (end - first + KEYS - 1) // KEYS
    gap_at, gap = tiles, 0
    if PHASED:
        clear = (clear_end - clear_begin) // KEYS
        accumulator, rest, peak, total = _walk(
            accumulator, rest, peak, total, queries, queries_rest, position, fork, bits, k_cache,
            v_cache, table, kv_head, clear_begin, clear, 0, 0, begin, end, by, bend, window,
            KV_HEADS, HEAD_DIM, BLOCK_D, REST_D, KEYS, PAGE_SIZE, WINDOWED, SOFTCAPPED, BRANCHED,
            False, lift, HALF, UPCAST,
        )  # fmt: skip
        tiles -= clear
        gap_at, gap = (clear_begin - first) // KEYS, clear_end - clear_begin
    accumulator, rest, peak, total = _walk(
        accumulator, rest, peak, total, queries, queries_rest, position, fork, bits, k_cache,
        v_cache, table, kv_head, first, tiles, gap_at, gap, begin, end, by, bend, window,
        KV_HEADS, HEAD_DIM, BLOCK_D, REST_D, KEYS, PAGE_SIZE, WINDOWED, SOFTCAPPED, BRANCHED,
        True, lift, HALF, UPCAST,
    )  # fmt: skip

    # A row that sees no key of this item has weight 0 in the merge: exp2(-inf).
    weight = tl.where(total == 0.0, 1.0, total)
    log = peak - lift + tl.log2(weight)
    result = accumulator / weight[:, None]
    if REST_D:
        rest = rest / weight[:, None]
    if SCALED:
        v_scale = tl.load(v_scales + kv_head)
        result = result * v_scale
        if REST_D:
            rest = rest * v_scale
    heads = KV_HEADS * GROUP
    if PARTIAL:
        slot = tl.load(item_slots + tl.load(item + 7) + local, mask=valid, other=-1)
        partial = valid & (slot >= 0)
        to = slot.to(tl.int64) * heads + head
        tl.store(partial_lse + to, log, mask=partial)
        _store_part(partial_out, to * HEAD_DIM, result, partial, 0, HEAD_DIM, BLOCK_D)
        if REST_D:
            _store_part(partial_out, to * HEAD_DIM, rest, partial, BLOCK_D, HEAD_DIM, REST_D)
        valid = valid & (slot < 0)
    to = row.to(tl.int64) * heads + head
    tl.store(lse + to, log * 0.6931471805599453, mask=valid)
    _store_part(out, to * HEAD_DIM, result, valid, 0, HEAD_DIM, BLOCK_D)
    if REST_D:
        _store_part(out, to * HEAD_DIM, rest, valid, BLOCK_D, HEAD_DIM, REST_D)


@triton.jit
def attend_items(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    items: tl.tensor,
    item_rows: tl.tensor,
    item_slots: tl.tensor,
    positions: tl.tensor,
    branches: tl.tensor,
    page_table: tl.tensor,
    count: tl.tensor,
    q_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    BRANCHED: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    PARTIAL: tl.constexpr,
    PHASED: tl.constexpr,
    PERSISTENT: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One item for PACKED of a KV head's GROUP query heads: grid ``(items * KV_HEADS * parts,)``.

    The programs of an item lie side by side: where a group has several parts, all but the first
    find its keys in the second level cache. A head's elements are those of BLOCK_D and of REST_D.

    PERSISTENT: the grid is any, and a program takes every so many of these places, up to those of
    ``count`` int32 ``[1]`` items. A graph has room for more items than a step has.

    ``out [T, Hq, D]`` and ``lse [T, Hq]`` take the rows whose slot is -1; the others go to their
    slot of ``partial_out`` float32 and ``partial_lse``, whose logarithms are to base 2. PARTIAL
    is whether there are any. BRANCHED: rows may be those of trees, see ``TreeSchedule.branches``.
    PHASED walks the tiles that need no mask in a loop of their own. SCALED: the cache is one of
    8-bit floats, with scales; HALF: and it is multiplied in float16. ``scale`` is not
    negative.
    """
    begin(DEPENDENT)
    number = tl.program_id(0)
    if PERSISTENT:
        units: tl.constexpr = KV_HEADS * ((GROUP + PACKED - 1) // PACKED)
        end = tl.load(count) * units
        while number < end:
            _attend_item(
                number, q, k_cache, v_cache, k_scales, v_scales, out, lse,
                partial_out, partial_lse, items, item_rows, item_slots, positions,
                branches, page_table, q_stride, scale, softcap, window, GROUP,
                PACKED, KV_HEADS, HEAD_DIM, BLOCK_D, REST_D, QUERIES, KEYS,
                PAGE_SIZE, WINDOWED, SOFTCAPPED, BRANCHED, SCALED, HALF, PARTIAL,
                PHASED, UPCAST,
            )  # fmt: skip
            number += tl.num_programs(0)
    else:
        _attend_item(
            number, q, k_cache, v_cache, k_scales, v_scales, out, lse, partial_out,
            partial_lse, items, item_rows, item_slots, positions, branches, page_table,
            q_stride, scale, softcap, window, GROUP, PACKED, KV_HEADS, HEAD_DIM,
            BLOCK_D, REST_D, QUERIES, KEYS, PAGE_SIZE, WINDOWED, SOFTCAPPED, BRANCHED,
            SCALED, HALF, PARTIAL, PHASED, UPCAST,
        )  # fmt: skip
