"""A token of each row of logits, as ``choose`` explains, in Triton: several programs a row.

The weights of a row, and its filters, are found in few passes over it:

    greatest     the greatest logit of each part of a row, and of up to 1,024 groups of its tokens
    count_keys   top-k: how many keys are in each of 1,024 ranges, ten bits of a key at a time, so
                 that three launches find the last key that is kept. Of so many groups as top-k
                 keeps tokens, each has one that is kept: so keys below the least of the greatest
                 groups are not counted, which are nearly all
    weigh_keys   top-p: the weight in each range, likewise, among what top-k keeps
    keep         the weight of what is kept of each part
    draw         the part, and in it the token, at which the running sum is enough

Programs of rows without that filter return at once, and without such rows nothing is launched.
Weights are added up as multiples of 2^-44, in 64 bits: so sums are exact, in whatever order atomic
additions come, and a row's token does not depend on the number of its parts. A vocabulary has room
up to 2^19 tokens. Each weight is rounded by at most 2^-45 of the greatest, which is less than the
exponential function is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from coppice.kernels.sampling.columns import COLUMNS, TOP_K, TOP_P
from coppice.kernels.triton.dependent import begin, dependent

_BLOCK = 4096
_WARPS = 8
# The most parts of a row, where rows are few, and where they alone fill a GPU: a part's program
# takes longer to begin than to walk a block. Kernels are compiled for both.
_PARTS, _FEWER_PARTS = 16, 4
_MANY_ROWS = 64
#: Weights are multiples of this part of 1, so this is the longest row whose sum has room.
_UNIT = tl.constexpr(2.0**44)
MOST_VOCABULARY = 1 << 19
# Ranges of ten bits of a key, of thirty; numbers that launches hand on: two of each level.
_BINS = tl.constexpr(1024)
_LEVELS = tl.constexpr(3)
_STATE = tl.constexpr(8)
# The most groups of a row's tokens whose greatest logits are kept.
_GROUPS = 1024


def choose_rows(
    logits: torch.Tensor, columns: torch.Tensor, asked: np.ndarray | None = None
) -> torch.Tensor:
    """A token of each row, int64 ``[R]``: see ``choose.choose``; ``columns`` are on the device.

    ``asked``: the same columns on the host, by which launches are left out that no row needs; a
    graph has all of them.
    """
    if logits.data_ptr() % 16:  # kernels are compiled for rows that begin at such addresses
        logits = logits.clone()
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or not columns.is_contiguous():
        raise ValueError(
            f"logits have strides {logits.stride()}, columns {columns.stride()}; the numbers of a "
            "row must lie side by side"
        )
    if vocabulary > MOST_VOCABULARY:
        raise ValueError(
            f"logits have rows of {vocabulary}; they must have at most {MOST_VOCABULARY}"
        )
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    block = min(_BLOCK, max(16, triton.next_power_of_2(vocabulary)))
    most = _PARTS if rows < _MANY_ROWS else _FEWER_PARTS
    parts = min(most, max(2, triton.next_power_of_2(triton.cdiv(vocabulary, block))))
    random, few_k, few_p = True, True, True
    if asked is not None:
        some = asked[:, TOP_K] != 1
        random = bool(some.any())
        few_k = bool((some & (asked[:, TOP_K] < vocabulary)).any())
        few_p = bool((some & (asked[:, TOP_P] < 1)).any())

    def made(count: int, dtype: torch.dtype, *, zero: bool = False) -> torch.Tensor:
        make: Callable[..., torch.Tensor] = torch.zeros if zero else torch.empty
        return make(rows * count, dtype=dtype, device=logits.device)

    best, places = made(parts, torch.float32), made(parts, torch.int32)
    groups = min(block, _GROUPS // parts) if few_k else 1
    tops = made(parts * groups, torch.float32)
    counts = made(_LEVELS.value * _BINS.value if few_k else 1, torch.int32, zero=True)
    sums = made(_LEVELS.value * _BINS.value if few_p else 1, torch.int64, zero=True)
    state = made(_STATE.value, torch.int64)
    masses, kept = made(parts, torch.int64), made(parts, torch.int64)
    same = made(parts, torch.int32)
    warps = _WARPS if block == _BLOCK else 4
    shape = {"PARTS": parts, "BLOCK": block, "num_warps": warps, **dependent(logits.device)}
    row = (logits, columns, best, logits.stride(0), vocabulary)
    greatest[(rows, parts)](
        logits, columns, best, logits.stride(0), vocabulary, tops, places,
        COLUMNS=COLUMNS, GROUPS=groups, **shape,
    )  # fmt: skip
    if few_k:
        for level in range(3):
            count_keys[(rows, parts)](
                *row, tops, counts, state, COLUMNS=COLUMNS, GROUPS=groups, LEVEL=level, **shape
            )
    if few_p:
        for level in range(3):
            weigh_keys[(rows, parts)](
                *row, counts, sums, state, masses,
                COLUMNS=COLUMNS, FEW_K=few_k, LEVEL=level, **shape,
            )  # fmt: skip
    filters = {"COLUMNS": COLUMNS, "FEW_K": few_k, "FEW_P": few_p}
    if random:
        keep[(rows, parts)](*row, counts, sums, state, masses, kept, same, **filters, **shape)
    draw[(rows,)](*row, places, state, kept, same, tokens, COLUMNS=COLUMNS, **shape)
    return tokens


def warm_up(vocabulary: int, device: torch.device) -> None:
    """Compiles what `choose_rows` may launch for rows of this length."""
    for rows in (1, _MANY_ROWS):
        logits = torch.zeros(rows, vocabulary, device=device)
        for few_k in (False, True):
            for few_p in (False, True):
                one = [1.0, 2 if few_k else vocabulary, 0.5 if few_p else 1.0, 0.0, 0.5]
                asked = np.array([one] * rows)
                choose_rows(logits, torch.from_numpy(asked).to(device), asked)


@triton.jit
def _part(
    part: tl.tensor, vocabulary: tl.tensor, PARTS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where a part of a row begins and ends: parts are whole blocks, the last ones may be empty."""
    length = tl.cdiv(tl.cdiv(vocabulary, BLOCK), PARTS) * BLOCK
    return part * length, tl.minimum((part + 1) * length, vocabulary)


@triton.jit
def _top(best: tl.tensor, row: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The greatest logit of a row."""
    return tl.max(tl.load(best + row * PARTS + tl.arange(0, PARTS)))


@triton.jit
def _keys(
    logits: tl.tensor,
    start: tl.tensor,
    vocabulary: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The weights of a block, their keys, and ids; 0 after the end, and for what is not finite."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, mask=ids < vocabulary, other=-float("inf"))
    weights = tl.exp((x - top) / temperature)
    weights = tl.where(weights <= 1.0, weights, 0.0)
    return weights, weights.to(tl.int32, bitcast=True), ids


@triton.jit
def _whole(weights: tl.tensor) -> tl.tensor:
    """Weights as multiples of the unit, int64."""
    return (weights.to(tl.float64) * _UNIT + 0.5).to(tl.int64)


@triton.jit
def _narrowed(
    bins: tl.tensor, target: tl.tensor, prefix: tl.tensor, above: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The highest range with which the target is reached, after its prefix, and what is above it.

    ``above`` is what lies above all of these ranges.
    """
    places = tl.arange(0, _BINS)
    each = tl.load(bins + places).to(tl.int64)
    reached = above + tl.cumsum(each, reverse=True)
    place = tl.max(tl.where((each > 0) & (reached.to(tl.float64) >= target), places, 0))
    more = tl.sum(tl.where(places == place, reached - each, 0))
    return prefix * _BINS + place, more


@triton.jit
def _last_counted(
    counts: tl.tensor, state: tl.tensor, top_k: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The last key that top-k keeps, and how many of its equals, after all counts."""
    prefix, above = tl.load(state + 2), tl.load(state + 3)
    place, above = _narrowed(counts + 2 * _BINS, top_k, prefix, above)
    return place, top_k.to(tl.int64) - above


@triton.jit
def greatest(
    logits: tl.tensor,
    columns: tl.tensor,
    best: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    tops: tl.tensor,
    places: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The greatest logit of each part, and the first id that has it: grid ``(R, PARTS)``.

    With GROUPS above 1 also that of each group of a part's tokens, in ``tops`` float32
    ``[R, PARTS * GROUPS]``, of rows with top-k.
    """
    begin(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * stride
    first, end = _part(part, vocabulary, PARTS, BLOCK)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32)
    for start in range(first, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocabulary, other=-float("inf"))
        where = tl.where(x > most, ids, where)
        most = tl.maximum(x, most)
    top = tl.max(most)
    tl.store(best + row * PARTS + part, top)
    tl.store(places + row * PARTS + part, tl.min(tl.where(most == top, where, vocabulary - 1)))
    if GROUPS > 1:
        top_k = tl.load(columns + row * COLUMNS + 1)
        if (top_k != 1) & (top_k < vocabulary):
            each = tl.max(tl.reshape(most, [GROUPS, BLOCK // GROUPS]), 1)
            tl.store(tops + (row * PARTS + part) * GROUPS + tl.arange(0, GROUPS), each)


@triton.jit
def _least_counted(
    tops: tl.tensor, top: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, NUMBER: tl.constexpr
) -> tl.tensor:
    """A key that at least ``top_k`` tokens reach: that of the group which is so many-th greatest.

    Of its bits the first 17, 0 behind them; 0 if there are not so many groups.
    """
    weights = tl.exp((tl.load(tops + tl.arange(0, NUMBER)) - top) / temperature)
    keys = tl.where(weights <= 1.0, weights, 0.0).to(tl.int32, bitcast=True)
    least = tl.full((), 0, tl.int32)
    for place in range(17):
        more = least | (1 << (30 - place))
        least = tl.where(tl.sum((keys >= more).to(tl.int32)) >= top_k, more, least)
    return least


@triton.jit
def count_keys(
    logits: tl.tensor,
    columns: tl.tensor,
    best: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    tops: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    LEVEL: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """How many keys are in each range of a level, within that which the level before has found.

    ``counts`` are int32 ``[R, 3, 1024]``, zero at first; ``tops`` those of ``greatest``. So few
    keys are counted that adding them one by one is faster than a histogram of each block.
    """
    begin(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    columns += row * COLUMNS
    top_k = tl.load(columns + 1)
    if (top_k != 1) & (top_k < vocabulary):
        logits += row.to(tl.int64) * stride
        counts += row * (_LEVELS * _BINS)
        state += row * _STATE
        temperature = tl.load(columns).to(tl.float32)
        top = _top(best, row, PARTS)
        prefix = tl.full((), 0, tl.int64)
        above = tl.full((), 0, tl.int64)
        least = tl.full((), 0, tl.int32)
        if LEVEL == 0:
            number: tl.constexpr = PARTS * GROUPS
            least = _least_counted(tops + row * number, top, temperature, top_k, number)
        if LEVEL == 2:
            prefix, above = tl.load(state), tl.load(state + 1)
        if LEVEL > 0:
            prefix, above = _narrowed(counts + (LEVEL - 1) * _BINS, top_k, prefix, above)
            if part == 0:
                tl.store(state + 2 * (LEVEL - 1), prefix)
                tl.store(state + 2 * (LEVEL - 1) + 1, above)
        first, end = _part(part, vocabulary, PARTS, BLOCK)
        for start in range(first, end, BLOCK):
            _, keys, ids = _keys(logits, start, vocabulary, top, temperature, BLOCK)
            here = (ids < end) & (keys >= least)
            if LEVEL > 0:
                here &= (keys >> (30 - 10 * LEVEL)) == prefix.to(tl.int32)
            places = (keys >> (20 - 10 * LEVEL)) & (_BINS - 1)
            tl.atomic_add(counts + LEVEL * _BINS + places, 1, mask=here, sem="relaxed")


@triton.jit
def weigh_keys(
    logits: tl.tensor,
    columns: tl.tensor,
    best: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    state: tl.tensor,
    masses: tl.tensor,
    COLUMNS: tl.constexpr,
    FEW_K: tl.constexpr,
    LEVEL: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The weight of the keys in each range of a level, of what top-k keeps.

    ``sums`` are int64 ``[R, 3, 1024]``, zero at first; ``masses`` int64 ``[R, PARTS]`` get the
    weight of each part.
    """
    begin(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    columns += row * COLUMNS
    top_k, top_p = tl.load(columns + 1), tl.load(columns + 2)
    if (top_k != 1) & (top_p < 1):
        logits += row.to(tl.int64) * stride
        counts += row * (_LEVELS * _BINS)
        sums += row * (_LEVELS * _BINS)
        state += row * _STATE
        temperature = tl.load(columns).to(tl.float32)
        top = _top(best, row, PARTS)
        last = tl.full((), 0, tl.int32)
        equals = tl.full((), 0, tl.int32)
        # Without top-k: weights that are together less than what top-p leaves out are not those at
        # which it ends, and need not be known by ranges.
        least = (1 - top_p).to(tl.float32) / (2 * vocabulary).to(tl.float32)
        if FEW_K:  # noqa: SIM102 - known when the kernel is compiled
            if top_k < vocabulary:
                place, number = _last_counted(counts, state, top_k)
                last, equals = place.to(tl.int32), number.to(tl.int32)
                least = tl.full((), 0, tl.float32)
        if LEVEL > 0:
            total = tl.sum(tl.load(masses + row * PARTS + tl.arange(0, PARTS)))
            prefix = tl.full((), 0, tl.int64)
            above = tl.full((), 0, tl.int64)
            if LEVEL == 2:
                prefix, above = tl.load(state + 4), tl.load(state + 5)
            target = top_p * total.to(tl.float64)
            prefix, above = _narrowed(sums + (LEVEL - 1) * _BINS, target, prefix, above)
            if part == 0:
                tl.store(state + 2 * (LEVEL + 1), prefix)
                tl.store(state + 2 * (LEVEL + 1) + 1, above)
            wanted = prefix.to(tl.int32)
        first, end = _part(part, vocabulary, PARTS, BLOCK)
        mass = tl.zeros([BLOCK], tl.int64)
        for start in range(first, end, BLOCK):
            weights, keys, ids = _keys(logits, start, vocabulary, top, temperature, BLOCK)
            whole = tl.where((keys > last) & (ids < end), _whole(weights), 0)
            if LEVEL == 0:
                mass += whole
            here = (whole > 0) & (weights >= least)
            if LEVEL > 0:
                here &= (keys >> (30 - 10 * LEVEL)) == wanted
            places = (keys >> (20 - 10 * LEVEL)) & (_BINS - 1)
            tl.atomic_add(sums + LEVEL * _BINS + places, whole, mask=here, sem="relaxed")
        mine = tl.full((), 0, tl.int64)
        if LEVEL == 0:
            mine = tl.sum(mass)
        if part == 0:
            # The equals of the last key that top-k keeps.
            rest = equals.to(tl.int64) * _whole(last.to(tl.float32, bitcast=True))
            if equals > 0:
                mine += rest
                inside = rest > 0
                if LEVEL > 0:
                    inside &= (last >> (30 - 10 * LEVEL)) == wanted
                place = (last >> (20 - 10 * LEVEL)) & (_BINS - 1)
                tl.atomic_add(sums + LEVEL * _BINS + place, rest, mask=inside, sem="relaxed")
        if LEVEL == 0:
            tl.store(masses + row * PARTS + part, mine)


@triton.jit
def keep(
    logits: tl.tensor,
    columns: tl.tensor,
    best: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    state: tl.tensor,
    masses: tl.tensor,
    kept: tl.tensor,
    same: tl.tensor,
    COLUMNS: tl.constexpr,
    FEW_K: tl.constexpr,
    FEW_P: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Of each part the weight above the last kept key, and how many are equal to it.

    ``kept`` int64 and ``same`` int32 ``[R, PARTS]``. The last key and the number of its equals that
    are kept are left in ``state``.
    """
    begin(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    columns += row * COLUMNS
    top_k, top_p = tl.load(columns + 1), tl.load(columns + 2)
    if top_k != 1:
        logits += row.to(tl.int64) * stride
        counts += row * (_LEVELS * _BINS)
        sums += row * (_LEVELS * _BINS)
        state += row * _STATE
        temperature = tl.load(columns).to(tl.float32)
        min_p = tl.load(columns + 3)
        top = _top(best, row, PARTS)
        last = tl.full((), 0, tl.int64)
        equals = vocabulary.to(tl.int64)
        if FEW_K:  # noqa: SIM102 - known when the kernel is compiled
            if top_k < vocabulary:
                last, equals = _last_counted(counts, state, top_k)
        if FEW_P:  # noqa: SIM102
            if top_p < 1:
                total = tl.sum(tl.load(masses + row * PARTS + tl.arange(0, PARTS)))
                target = top_p * total.to(tl.float64)
                prefix, above = tl.load(state + 6), tl.load(state + 7)
                key, above = _narrowed(sums + 2 * _BINS, target, prefix, above)
                each = _whole(key.to(tl.int32).to(tl.float32, bitcast=True))
                # How many equals are needed to reach the target.
                needed = tl.ceil((target - above.to(tl.float64)) / tl.maximum(each, 1))
                count = tl.maximum(needed.to(tl.int64), 1)
                equals = tl.where(key > last, count, tl.minimum(count, equals))
                last = tl.maximum(key, last)
        border = last.to(tl.int32)
        first, end = _part(part, vocabulary, PARTS, BLOCK)
        mass = tl.zeros([BLOCK], tl.int64)
        number = tl.zeros([BLOCK], tl.int32)
        for start in range(first, end, BLOCK):
            weights, keys, ids = _keys(logits, start, vocabulary, top, temperature, BLOCK)
            here = (ids < end) & (weights >= min_p)
            mass += tl.where(here & (keys > border), _whole(weights), 0)
            number += (here & (keys == border)).to(tl.int32)
        tl.store(kept + row * PARTS + part, tl.sum(mass))
        tl.store(same + row * PARTS + part, tl.sum(number))
        if part == 0:
            tl.store(state, last)
            tl.store(state + 1, equals)


@triton.jit
def draw(
    logits: tl.tensor,
    columns: tl.tensor,
    best: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    places: tl.tensor,
    state: tl.tensor,
    kept: tl.tensor,
    same: tl.tensor,
    tokens: tl.tensor,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The token of a row, int64 in ``tokens``: grid ``(R,)``."""
    begin(DEPENDENT)
    row = tl.program_id(0)
    columns += row * COLUMNS
    top_k = tl.load(columns + 1)
    number = tl.arange(0, PARTS)
    tops = tl.load(best + row * PARTS + number)
    top = tl.max(tops)
    chosen = tl.min(tl.where(tops == top, tl.load(places + row * PARTS + number), vocabulary - 1))
    if top_k != 1:
        logits += row.to(tl.int64) * stride
        temperature = tl.load(columns).to(tl.float32)
        min_p, uniform = tl.load(columns + 3), tl.load(columns + 4)
        border = tl.load(state + row * _STATE).to(tl.int32)
        equals = tl.load(state + row * _STATE + 1)
        each = _whole(border.to(tl.float32, bitcast=True))
        ours = tl.load(same + row * PARTS + number).to(tl.int64)
        before = tl.cumsum(ours) - ours
        taken = tl.minimum(ours, tl.maximum(equals - before, 0))
        mass = tl.load(kept + row * PARTS + number) + taken * each
        running = tl.cumsum(mass)
        target = uniform * tl.sum(mass).to(tl.float64)
        full = mass > 0
        part = tl.min(tl.where(full & (running.to(tl.float64) > target), number, PARTS))
        if part == PARTS:  # by rounding of the target: the last token that is kept
            part = tl.max(tl.where(full, number, 0))
        at = number == part
        reached = tl.sum(tl.where(at, running - mass, 0))
        seen = tl.sum(tl.where(at, before, 0))
        start, end = _part(part, vocabulary, PARTS, BLOCK)
        chosen = tl.full((), 0, tl.int32)
        done = tl.full((), 0, tl.int32)
        while (start < end) & (done == 0):
            weights, keys, ids = _keys(logits, start, vocabulary, top, temperature, BLOCK)
            here = (ids < end) & (weights >= min_p)
            equal = (here & (keys == border)).to(tl.int64)
            rank = seen + tl.cumsum(equal)
            here &= (keys > border) | ((equal > 0) & (rank <= equals))
            whole = tl.where(here, _whole(weights), 0)
            sums = reached + tl.cumsum(whole)
            first = tl.min(tl.where((sums.to(tl.float64) > target) & (whole > 0), ids, vocabulary))
            if first < vocabulary:
                chosen = first
                done = tl.full((), 1, tl.int32)
            else:
                chosen = tl.maximum(chosen, tl.max(tl.where(whole > 0, ids, 0)))
            reached += tl.sum(whole)
            seen += tl.sum(equal)
            start += BLOCK
    tl.store(tokens + row, chosen.to(tl.int64))
