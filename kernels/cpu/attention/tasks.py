"""What the CPU backend compiles: items of a tree schedule over pages in place, then the merge.

An item is some rows of the batch over a range of one page table's keys (``schedule.items``). The
kernel walks it tile by tile with an online softmax in base 2 (the scale includes log2 e), for all
query heads of a KV head and all rows of the item at once (``full_lanes``, or ``few_lanes`` where
they are few). It reads keys and values in their pages, and prefetches the next tile meanwhile.
Tasks are items, or one KV head of an item; the schedule has assigned them to threads. A row with
several items is merged from their results by log-sum-exp, in the order of keys.

The functions are compiled on first use, and ``code.kept`` keeps them on disk.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from coppice.kernels.cpu.attention.arguments import Inputs, Items, Results
from coppice.kernels.cpu.attention.few_lanes import (
    FEW,
    few_gather,
    few_query,
    few_scores,
    few_weigh,
)
from coppice.kernels.cpu.attention.full_lanes import (
    KEY_ROOM,
    MOST_LANES,
    TILE,
    VALUE_ROOM,
    gather,
    lay_across,
    lay_along,
    scores,
    weigh,
)
from coppice.kernels.cpu.attention.softcap import cap
from coppice.kernels.cpu.attention.stored import put
from coppice.kernels.cpu.attention.tile_lanes import NUMBERS
from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.pairs import HAS_PAIRS
from coppice.kernels.cpu.code.simd import LANES, VECTORS
from coppice.kernels.cpu.code.tiles import (
    HAS_TILES,
    TILE_BYTES,
    TILE_ROWS,
    configuration,
    configure,
    release,
)

__all__ = [
    "FAST",
    "FRAME",
    "LANES",
    "MOST_LANES",
    "TILE",
    "VECTORS",
    "attention_frame",
    "merge_share",
    "work_tasks",
]

# No nnan and no ninf: -inf is the maximum of nothing and the log of no weight.
FAST = {"contract", "reassoc", "arcp", "nsz"}

_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_NEG_INF = np.float32(-np.inf)
_V0, _V1, _V2, _V3 = VECTORS
_F0, _F1 = FEW
# Keys that fill a vector of the fewest lanes.
_SIDE = LANES // _F0
# Keys and values of a tile of few lanes.
_FEW_BYTES = 1 << 16
# Floats of a cache line.
_LINE = 16
#: Numbers and addresses that ``run_tasks`` is given.
FRAME = 32
_SHAPE = configuration(TILE_ROWS)
# Bytes of a tile's keys and values, for each number of a head, as products by tiles take them.
_ROOM = KEY_ROOM + VALUE_ROOM
# Bytes of them that a thread keeps for its next tasks: a part of the second-level cache. To copy
# and transpose them for each task took a tenth of a prompt's time.
_KEPT = 1 << 20


@njit
def _locate(
    table: np.ndarray, begin: int, stop: int, end: int, page_size: int, width: int, at: np.ndarray
) -> None:
    """Where the keys ``begin .. stop`` lie, in numbers; past ``end`` the last one again.

    That one is readable, since the sequence owns it, and its repeated products are not used.
    """
    page = begin // page_size
    slot = begin - page * page_size
    start = np.int64(table[page]) * page_size
    for t in range(begin, stop):
        at[t - begin] = (start + slot) * width
        if t + 1 < end:
            slot += 1
            if slot == page_size:
                slot = 0
                page += 1
                start = np.int64(table[page]) * page_size


@njit
def _hide(
    s: np.ndarray,
    begin: int,
    count: int,
    seen_from: np.ndarray,
    seen_to: np.ndarray,
    forks: np.ndarray,
) -> None:
    """Scores ``[count, lanes]`` of keys that a lane's row does not see become -inf.

    ``forks`` ``[lanes, 2]``, or empty: as ``TreeSchedule.branches`` of the lanes' rows.
    """
    for t in range(count):
        key = np.int32(begin + t)
        mine = s[t]
        for lane in range(len(seen_to)):  # in whole vectors
            hidden = (key > seen_to[lane]) | (key < seen_from[lane])
            mine[lane] = _NEG_INF if hidden else mine[lane]
        for lane in range(len(forks)):
            number = key - forks[lane, 0]
            if number >= 0 and not forks[lane, 1] >> min(number, 62) & 1:
                mine[lane] = _NEG_INF


@njit
def _hide_few(
    s: np.ndarray,
    begin: int,
    count: int,
    vectors: int,
    partly: bool,
    seen_from: np.ndarray,
    seen_to: np.ndarray,
    forks: np.ndarray,
) -> None:
    """The same for few lanes: keys that only fill the last vector are hidden from all."""
    if partly:
        _hide(s, begin, count, seen_from, seen_to, forks)
    s[count : vectors * LANES // s.shape[1]] = _NEG_INF


# Becomes part of ``run_tasks``, and is compiled nowhere else.
@njit(inline="always")
def _work(
    n: int,
    last: int,
    tasks: np.ndarray,
    items: np.ndarray,
    q: np.ndarray,
    q_stride: int,
    keys: np.ndarray,
    values: np.ndarray,
    page_indices: np.ndarray,
    rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    branches: np.ndarray,
    page_size: int,
    kv_heads: int,
    dim: int,
    scale: np.float32,
    window: int,
    softcap: np.float32,
    out: np.ndarray,
    lse: np.ndarray,
    partial_out: np.ndarray,
    partial_lse: np.ndarray,
    kept: int,
    kept_size: int,
    whose: np.ndarray,
) -> None:
    """Task n; those up to ``last`` come after it on this thread.

    At ``kept`` are whole tiles of keys and values that products by tiles may read again, in
    ``kept_size`` bytes; ``whose`` says of what keys and heads they are, and how many.
    """
    item, first_head, last_head = items[tasks[n, 0]], np.int64(tasks[n, 1]), np.int64(tasks[n, 2])
    count, begin, end = item[1], item[3], item[4]
    mine = rows[item[0] : item[0] + count]
    table = page_indices[item[2] :]
    group = lse.shape[1] // kv_heads
    heads = last_head - first_head
    needed = -(-count * group // LANES)
    wide = _V0 if needed <= _V0 else _V1 if needed <= _V1 else _V2 if needed <= _V2 else _V3
    lanes = across = wide * LANES
    few = count * group <= _F1 and dim % LANES == 0
    if few:
        lanes = _F0 if count * group <= _F0 else _F1

    # Vectors that lie across two cache lines take twice as long to load.
    size = (2 * heads * dim + TILE) * lanes + 2 * heads * across + _ROOM // 4 * dim + LANES
    scratch: Any = np.empty(size + _LINE, np.float32)
    used: Any = -(scratch.ctypes.data // 4) % _LINE
    size = heads * dim * lanes
    # [dim, lanes] of each head; of few lanes [lanes, dim].
    queries = scratch[used : used + size].reshape(heads, dim * lanes)
    paired = HAS_PAIRS and keys.itemsize == 2
    halves = queries.view(np.uint16)  # in pairs two to a lane
    used += size
    sums = scratch[used : used + size].reshape(heads, dim * lanes)
    sums[:] = np.float32(0)
    used += size
    top = scratch[used : used + heads * across].reshape(heads, across)
    top[:] = _NEG_INF
    used += heads * across
    total = scratch[used : used + heads * across].reshape(heads, across)
    total[:] = np.float32(0)
    used += heads * across
    s = scratch[used : used + TILE * lanes].reshape(TILE, lanes)
    used += TILE * lanes + LANES  # and a vector that fills a pair
    room = scratch[used : used + _ROOM // 4 * dim].ctypes.data
    # A lane without a row sees all.
    seen_from, seen_to = np.zeros(lanes, np.int32), np.full(lanes, np.int32(end))
    forks = np.empty((lanes if len(branches) else 0, 2), np.int64)
    forks[:, 0] = end
    lowest, highest = np.int64(end), np.int64(0)
    factor = scale * _LOG2E
    bound = softcap * _LOG2E  # as the scores, in base 2
    for i in range(count):
        position = np.int64(positions[mine[i]])
        lowest, highest = min(lowest, position), max(highest, position)
        for g in range(group):
            seen_to[i * group + g] = position
            seen_from[i * group + g] = position - window + 1 if window else 0
        if len(branches) and branches[mine[i], 1]:  # a row of a tree: bits decide
            lowest = min(lowest, branches[mine[i], 0])
            for g in range(group):
                seen_to[i * group + g] = end
                forks[i * group + g] = branches[mine[i]]
    whole = dim // LANES * LANES
    lines = np.empty(lanes, np.int64)
    for h in range(heads):
        for lane in range(lanes):
            i, g = lane // group, lane % group
            # A lane without a row takes the query of the first one; its result is not read.
            at_row, at_head = (mine[i], g) if i < count else (mine[0], 0)
            start = np.int64(at_row) * q_stride + ((first_head + h) * group + at_head) * dim
            if few:
                to = queries[h].ctypes.data + (2 if paired else 4) * lane * dim
                few_query(keys, q.ctypes.data + 4 * start, factor, dim, to)
                continue
            lines[lane] = q.ctypes.data + 4 * start
            for d in range(whole, dim):
                if paired:
                    put(halves[h], 2 * (d // 2 * lanes + lane) + d % 2, q[start + d] * factor)
                else:
                    queries[h, d * lanes + lane] = q[start + d] * factor
        for lane in range(0, 0 if few else lanes, LANES):
            to = queries[h].ctypes.data + 4 * lane
            lay_across(keys, lanes, lines.ctypes.data + 8 * lane, whole, factor, to)

    if not few and (
        whose[0] != item[2] or whose[1] != begin or whose[2] != first_head or whose[3] != last_head
    ):
        whose[0], whose[1], whose[2], whose[3], whose[4] = item[2], begin, first_head, last_head, 0
    tile: Any = TILE
    if few:
        # They wait for memory: what is prefetched has to stay in the second-level cache.
        fitting: Any = _FEW_BYTES // (2 * keys.itemsize * dim * heads) // _SIDE * _SIDE
        tile = min(TILE, max(fitting, _SIDE))
    at, following = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    width = kv_heads * dim
    # Keys of all heads lie side by side: where all are read they come in the order of memory. Few
    # lanes need little time for the keys of a head, and prefetch the next ones head by head.
    number = keys.itemsize  # bytes, a constant of what is compiled
    fetched = number * dim * heads
    _locate(table, begin, begin + tile, end, page_size, width, following)
    for start in range(begin, end, tile):
        many = min(tile, end - start)
        at, following = following, at
        if start + tile < end:
            _locate(table, start + tile, start + 2 * tile, end, page_size, width, following)
        elif n < last:
            other = items[tasks[n + 1, 0]]
            begun, table = np.int64(other[3]), page_indices[other[2] :]
            _locate(table, begun, begun + tile, np.int64(other[4]), page_size, width, following)
        partly = start + many - 1 > lowest or (window > 0 and start <= highest - window)
        # Whole vectors of few lanes' scores, several keys side by side in each.
        full = -(-many * lanes // LANES)
        here, ahead, to = at.ctypes.data, following.ctypes.data, s.ctypes.data
        number_of = (start - begin) // TILE
        keeps = not few and many == TILE and (number_of + 1) * heads * _ROOM * dim <= kept_size
        fresh = not (keeps and number_of < whose[4])
        for h in range(heads):
            key_room = room
            if keeps:
                key_room = kept + (number_of * heads + h) * _ROOM * dim
            value_room = key_room + KEY_ROOM * dim
            k = keys.ctypes.data + number * (first_head + h) * dim
            v = values.ctypes.data + number * (first_head + h) * dim
            asked, result = queries[h].ctypes.data, sums[h].ctypes.data
            best, weight = top[h].ctypes.data, total[h].ctypes.data
            fetch = number * dim if few else fetched if h == 0 else 0
            # The first argument is a constant of what is compiled, hence one call for each.
            if few and lanes == _F0:
                few_scores(_F0, keys, asked, k, v, here, many, ahead, fetch, dim, to)
                if bound > 0:
                    cap(to, full, bound)
                _hide_few(s, start, many, full, partly, seen_from, seen_to, forks)
                few_weigh(_F0, keys, to, full, best, weight, result, dim)
                few_gather(_F0, keys, to, v, here, many, result, dim)
            elif few:
                few_scores(_F1, keys, asked, k, v, here, many, ahead, fetch, dim, to)
                if bound > 0:
                    cap(to, full, bound)
                _hide_few(s, start, many, full, partly, seen_from, seen_to, forks)
                few_weigh(_F1, keys, to, full, best, weight, result, dim)
                few_gather(_F1, keys, to, v, here, many, result, dim)
            elif wide == _V0:
                scores(_V0, keys, asked, k, v, here, many, ahead, fetch, dim, to, key_room, fresh)
                if bound > 0:
                    cap(to, many * _V0, bound)
                if partly:
                    _hide(s, start, many, seen_from, seen_to, forks)
                weigh(_V0, keys, to, many, best, weight, result, dim)
                gather(_V0, keys, to, v, here, many, result, dim, value_room, fresh)
            elif wide == _V1:
                scores(_V1, keys, asked, k, v, here, many, ahead, fetch, dim, to, key_room, fresh)
                if bound > 0:
                    cap(to, many * _V1, bound)
                if partly:
                    _hide(s, start, many, seen_from, seen_to, forks)
                weigh(_V1, keys, to, many, best, weight, result, dim)
                gather(_V1, keys, to, v, here, many, result, dim, value_room, fresh)
            elif wide == _V2:
                scores(_V2, keys, asked, k, v, here, many, ahead, fetch, dim, to, key_room, fresh)
                if bound > 0:
                    cap(to, many * _V2, bound)
                if partly:
                    _hide(s, start, many, seen_from, seen_to, forks)
                weigh(_V2, keys, to, many, best, weight, result, dim)
                gather(_V2, keys, to, v, here, many, result, dim, value_room, fresh)
            else:
                scores(_V3, keys, asked, k, v, here, many, ahead, fetch, dim, to, key_room, fresh)
                if bound > 0:
                    cap(to, many * _V3, bound)
                if partly:
                    _hide(s, start, many, seen_from, seen_to, forks)
                weigh(_V3, keys, to, many, best, weight, result, dim)
                gather(_V3, keys, to, v, here, many, result, dim, value_room, fresh)
        if keeps and fresh:
            whose[4] = number_of + 1

    nowhere = np.empty(dim, np.float32)
    for h in range(heads):
        for lane in range(lanes):
            i, g = lane // group, lane % group
            weight = total[h, lane]
            if few:
                for other in range(lane + lanes, LANES, lanes):
                    weight += total[h, other]
            # A row that sees none of these keys has no weight, and a result of 0.
            inverse = np.float32(1) / weight if weight > 0 else np.float32(0)
            total[h, lane] = inverse
            if i >= count:
                lines[lane] = nowhere.ctypes.data
                continue
            slot = slots[item[7] + i] if len(slots) else np.int32(-1)
            place = np.int64(mine[i]) if slot < 0 else np.int64(slot)
            head = (first_head + h) * group + g
            to_out, to_lse = (out, lse) if slot < 0 else (partial_out, partial_lse)
            lines[lane] = to_out.ctypes.data + 4 * (place * out.shape[1] + head * dim)
            to_lse[place, head] = top[h, lane] * _LN2 + np.float32(math.log(weight))
            if few:
                along, line = sums[h, lane * dim : lane * dim + dim], to_out[place]
                for d in range(dim):
                    line[head * dim + d] = along[d] * inverse
                continue
            for d in range(whole, dim):
                to_out[place, head * dim + d] = sums[h, d * lanes + lane] * inverse
        for lane in range(0, 0 if few else lanes, LANES):
            columns, factors = sums[h].ctypes.data + 4 * lane, total[h].ctypes.data + 4 * lane
            lay_along(lanes, columns, whole, factors, lines.ctypes.data + 8 * lane)


@njit(fastmath=FAST, error_model="numpy")
def merge_share(begin: int, end: int, items: Items, results: Results) -> None:
    """Rows ``begin .. end`` of the merges from their partial results."""
    merges, dim = items.merges, items.dim
    out, lse, partial_out, partial_lse = results
    for n in range(begin, end):
        row, first, parts = merges[n, 0], merges[n, 1], merges[n, 2]
        for head in range(lse.shape[1]):
            high = _NEG_INF
            for part in range(first, first + parts):
                high = max(high, partial_lse[part, head])
            weight = np.float32(0)
            result = out[row, head * dim : head * dim + dim]
            result[:] = np.float32(0)
            for part in range(first, first + parts):
                share = np.float32(math.exp(partial_lse[part, head] - high))
                weight += share
                theirs = partial_out[part, head * dim : head * dim + dim]
                for d in range(dim):
                    result[d] += share * theirs[d]
            inverse = np.float32(1) / weight
            for d in range(dim):
                result[d] *= inverse
            lse[row, head] = high + np.float32(math.log(weight))


# Becomes part of ``run_tasks``, here and in ``half_items``.
@njit(inline="always")
def work_tasks(frame: int, begin: int, end: int, keys: np.ndarray, values: np.ndarray) -> None:
    """Tasks ``begin .. end`` of what ``attention_frame`` has laid out."""
    f = carray(pointer(frame), (FRAME,), np.int64)
    num_tasks, num_items, num_rows, num_slots, num_partials, num_tokens = (
        f[0], f[1], f[2], f[3], f[4], f[5],
    )  # fmt: skip
    q_stride, page_size, kv_heads, heads, dim, window = f[6], f[7], f[8], f[9], f[10], f[11]
    num_pages, q_size, num_branches = f[12], f[13], f[30]
    scale = carray(pointer(frame + 8 * 15), (1,), np.float32)[0]
    softcap = carray(pointer(frame + 8 * 29), (1,), np.float32)[0]
    tasks = carray(pointer(f[16]), (num_tasks, 3), np.int32)
    items = carray(pointer(f[17]), (num_items, 8), np.int32)
    page_indices = carray(pointer(f[18]), (num_pages,), np.int32)
    rows = carray(pointer(f[19]), (num_rows,), np.int32)
    slots = carray(pointer(f[20]), (num_slots,), np.int32)
    positions = carray(pointer(f[21]), (num_tokens,), np.int32)
    branches = carray(pointer(f[31]), (num_branches, 2), np.int64)
    q = carray(pointer(f[22]), (q_size,), np.float32)
    out = carray(pointer(f[25]), (num_tokens, heads * dim), np.float32)
    lse = carray(pointer(f[26]), (num_tokens, heads), np.float32)
    partial_out = carray(pointer(f[27]), (num_partials, heads * dim), np.float32)
    partial_lse = carray(pointer(f[28]), (num_partials, heads), np.float32)
    if keys.itemsize == 2:
        shape = _SHAPE.copy()
        configure(shape.ctypes.data)
        shape[0] = 0  # numba frees an array after its last use by name, not by address
    # Of whom the kept tiles are: page table, first key, heads; and how many they are.
    whose = np.full(5, -1, np.int64)
    tiled = keys.itemsize == 2 and HAS_TILES and dim % NUMBERS == 0 and end - begin > 1
    size = _KEPT if tiled else 0
    kept = np.empty(size + TILE_BYTES, np.uint8)
    kept_at = kept.ctypes.data + -kept.ctypes.data % TILE_BYTES
    for n in range(begin, end):
        _work(
            n, end - 1, tasks, items, q, q_stride, keys, values, page_indices, rows, slots,
            positions, branches, page_size, kv_heads, dim, scale, window, softcap, out, lse,
            partial_out, partial_lse, kept_at, size, whose,
        )  # fmt: skip
    if tiled:
        kept[0] = 0  # numba frees an array after its last use by name, not by address
    if keys.itemsize == 2:
        release()


@njit
def attention_frame(items: Items, inputs: Inputs, results: Results) -> np.ndarray:
    """What ``run_tasks`` takes; the arrays must stay alive."""
    frame = np.empty(FRAME, np.int64)
    frame[0], frame[1] = len(items.tasks), len(items.items)
    frame[2], frame[3] = len(items.rows), len(items.slots)
    frame[4], frame[5] = len(results.partial_lse), len(results.lse)
    frame[6], frame[7], frame[8] = inputs.stride, items.page_size, items.kv_heads
    frame[9], frame[10], frame[11] = results.lse.shape[1], items.dim, items.window
    frame[12], frame[13], frame[14] = (
        len(items.page_indices), len(inputs.queries), len(inputs.keys),
    )  # fmt: skip
    frame[15:16].view(np.float32)[0] = items.scale
    frame[29:30].view(np.float32)[0] = items.softcap
    frame[16], frame[17] = items.tasks.ctypes.data, items.items.ctypes.data
    frame[18], frame[19] = items.page_indices.ctypes.data, items.rows.ctypes.data
    frame[20], frame[21] = items.slots.ctypes.data, items.positions.ctypes.data
    frame[22], frame[23] = inputs.queries.ctypes.data, inputs.keys.ctypes.data
    frame[24], frame[25] = inputs.values.ctypes.data, results.out.ctypes.data
    frame[26], frame[27] = results.lse.ctypes.data, results.partial_out.ctypes.data
    frame[28] = results.partial_lse.ctypes.data
    frame[30], frame[31] = len(items.branches), items.branches.ctypes.data
    return frame
