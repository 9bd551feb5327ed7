"""A tile of attention in whole vectors: products without a copy of the keys, softmax, weighted sum.

Queries lie transposed, ``[dim, vectors * LANES]``: a lane is one query head of one row, and an
element of a key is multiplied with a whole vector of lanes. So scores come out with the lanes side
by side, their softmax needs no operation across lanes, and keys and values are read where they lie,
in any page, an element at a time. The lanes are filled by all query heads that share a KV head, of
all rows. One row alone leaves most lanes idle: ``few_lanes`` is for that case.

Pages in bfloat16 are multiplied in pairs where the processor can (``stored``): two neighbours of a
head in the products, two keys in the weighted sum, whose values are brought together first. Where
it has tiles these multiply all lanes (``tile_lanes``).

The functions' first argument is a constant: the vectors of a row of lanes, one of ``VECTORS``. Of
``pages``, the layer's keys, only the type counts: that of the numbers of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from coppice.kernels.cpu.attention.stored import SHORT, Stored
from coppice.kernels.cpu.attention.tile_lanes import NUMBERS, tile_gather, tile_scores
from coppice.kernels.cpu.code.pairs import dot_pairs, in_pairs
from coppice.kernels.cpu.code.simd import (
    LANES,
    LONG,
    SUMS,
    VECTORS,
    any_of,
    at_float,
    constant,
    counting,
    everywhere,
    fetch,
    greater,
    load,
    load_long,
    multiply_by,
    multiply_in,
    power_of_2,
    splat,
    store,
    transposed,
    unrolled,
    zeros,
)

#: Lanes of the widest row.
MOST_LANES = LANES * VECTORS[-1]
#: Keys a tile. Its scores (12 KiB with 4 vectors of 16) and the queries or values that they are
#: made of or multiplied with (16 and 12 KiB for heads of 64) stay in the nearest cache together.
TILE = 48
#: Bytes of ``room`` for each number of a head: a tile's keys, and its values filled up to 64.
KEY_ROOM, VALUE_ROOM = 2 * TILE, 128


def couple_in(b: Any, sums: list[Any], vectors: list[Any], pair: Any) -> None:
    """``sums[i] +=`` the products of pairs of ``vectors[i]`` with a vector of pairs."""
    for total, vector in zip(sums, vectors, strict=True):
        b.store(dot_pairs(b, b.load(total), vector, pair), total)


def _at_once(wide: int) -> int:
    """Keys or elements whose sums are made together: 4, 6 or 8, which divide ``TILE``."""
    return max(n for n in (4, 6, 8) if n == 4 or n * wide <= SUMS)


def _either(
    b: Any, stored: Stored, dim: Any, tiles: Callable[[], None], vectors: Callable[[], None]
) -> None:
    """Writes the product by tiles, where heads of ``dim`` numbers fill them, else by vectors."""
    if not stored.tiled:
        vectors()
        return
    fills = b.icmp_signed("==", b.and_(dim, constant(NUMBERS - 1)), constant(0))
    with b.if_else(fills) as (yes, no):
        with yes:
            tiles()
        with no:
            vectors()


def couple_lines(b: Any, stored: Stored, lines: list[Any], dim: Any, out: Any) -> None:
    """``out [dim, 2]`` in bfloat16: the numbers of two lines of a page, from addresses on."""
    whole = b.mul(b.sdiv(dim, constant(LANES)), constant(LANES))
    with counting(b, 0, whole, LANES) as d:
        store(b, stored.beside(b, lines, d), out, d)
    with counting(b, whole, dim, 1) as d:
        for i, line in enumerate(lines):
            number = b.load(b.inttoptr(stored.place(b, line, d), SHORT.as_pointer()))
            place = b.add(b.shl(d, constant(1)), constant(i))
            b.store(number, b.inttoptr(stored.place(b, out, place), SHORT.as_pointer()))


@intrinsic(prefer_literal=True)
def scores(
    typing: Any,
    vectors: Any,
    pages: Any,
    queries: Any,
    keys: Any,
    values: Any,
    at: Any,
    count: Any,
    following: Any,
    fetched: Any,
    dim: Any,
    out: Any,
    room: Any,
    fresh: Any,
) -> Any:
    """Products of a tile's keys with all lanes, into ``out``.

    ``queries`` is float32 ``[dim, lanes]``, in pairs ``[dim / 2, lanes, 2]``. Key t of the tile is
    ``dim`` numbers from number ``at[t]`` of ``keys`` on, ``at`` int64 ``[TILE]``, all of them
    readable. The first ``count`` rows of ``out [TILE, lanes]`` are the result. Meanwhile
    ``fetched`` bytes of each key at ``following`` (as ``at``), and of its value, are prefetched.
    ``room`` is for tiles: the keys as they take them, which are written there if they are
    ``fresh``, else read.
    """
    wide = vectors.literal_value
    together = _at_once(wide)
    stored = Stored(pages)
    signature = types.void(types.IntegerLiteral(wide), pages, *[types.int64] * 11)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        (
            _, _, queries, keys, values, at, count, following, fetched, dim, out, room, fresh,
        ) = arguments  # fmt: skip
        lanes = wide * LANES

        def by_tiles() -> None:
            tile_scores(
                b, wide, stored, queries, keys, values, at, count, following, fetched, dim, room,
                fresh, out,
            )  # fmt: skip

        def by_vectors() -> None:
            with counting(b, 0, count, together) as first:
                some_keys(first)

        def some_keys(first: Any) -> None:
            starts = []
            for j in range(together):
                index = b.add(first, constant(j))
                starts.append(stored.place(b, keys, load_long(b, at, index)))
                ahead = load_long(b, following, index)
                key, value = (stored.place(b, each, ahead) for each in (keys, values))
                fetch(b, key, value, fetched)
            sums = [zeros(b, wide) for _ in range(together)]

            def element(d: Any) -> None:
                row = b.mul(d, constant(lanes))
                here = [load(b, queries, b.add(row, constant(i * LANES))) for i in range(wide)]
                for start, mine in zip(starts, sums, strict=True):
                    multiply_in(b, mine, here, b.load(at_float(b, start, d)))

            def elements(d: Any) -> None:
                pairs = [stored.pair(b, start, d) for start in starts]
                for i in range(2):
                    row = b.mul(b.add(d, constant(i)), constant(lanes))
                    here = [load(b, queries, b.add(row, constant(i * LANES))) for i in range(wide)]
                    for pair, mine in zip(pairs, sums, strict=True):
                        multiply_by(b, mine, here, pair[i])

            def couples(d: Any) -> None:
                row = b.mul(b.lshr(d, constant(1)), constant(lanes))
                here = [load(b, queries, b.add(row, constant(i * LANES))) for i in range(wide)]
                for start, mine in zip(starts, sums, strict=True):
                    couple_in(b, mine, here, stored.couple(b, start, d))

            if stored.half:
                with counting(b, 0, dim, 2) as d:  # dim is even
                    (couples if stored.paired else elements)(d)
            else:
                unrolled(b, dim, element)
            for j, mine in enumerate(sums):
                row = b.mul(b.add(first, constant(j)), constant(lanes))
                for i, total in enumerate(mine):
                    store(b, b.load(total), out, b.add(row, constant(i * LANES)))

        _either(b, stored, dim, by_tiles, by_vectors)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def weigh(
    typing: Any,
    vectors: Any,
    pages: Any,
    scores: Any,
    count: Any,
    top: Any,
    total: Any,
    out: Any,
    dim: Any,
) -> Any:
    """Turns a tile's scores, in base 2, into weights under the running maximum of each lane.

    ``scores`` is ``[count, lanes]``; ``top``, ``total`` ``[lanes]`` and ``out [dim, lanes]`` hold
    the state before this tile: the maximum, the sum of weights, and the weighted sum of values.
    They are rescaled to the new maximum where it is greater, and ``total`` grows by the tile's
    weights. A lane that has seen no key has top -inf and the rest 0. Where values are multiplied in
    pairs the weights of two keys become ``[lanes, 2]``, the last one's perhaps beside 0.
    """
    wide = vectors.literal_value
    stored = Stored(pages)
    signature = types.void(types.IntegerLiteral(wide), pages, *[types.int64] * 6)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, scores, count, top, total, out, dim = arguments
        lanes = wide * LANES
        places = [constant(i * LANES) for i in range(wide)]
        old = [load(b, top, place) for place in places]
        best = [cgutils.alloca_once_value(b, each) for each in old]
        with cgutils.for_range(b, count, intp=LONG) as loop:
            row = b.mul(loop.index, constant(lanes))
            for each, place in zip(best, places, strict=True):
                b.store(greater(b, load(b, scores, b.add(row, place)), b.load(each)), each)
        new = [stored.highest(b, b.load(each)) for each in best]
        grew = ir.Constant(ir.IntType(1), 0)
        for before, after in zip(old, new, strict=True):
            grew = b.or_(grew, any_of(b, b.fcmp_ordered(">", after, before)))
        with b.if_then(grew):
            # The first tile comes here with top -inf: what it shrinks is 0.
            shrink = [
                power_of_2(b, b.fsub(before, after)) for before, after in zip(old, new, strict=True)
            ]
            for place, after, factor in zip(places, new, shrink, strict=True):
                store(b, after, top, place)
                store(b, b.fmul(load(b, total, place), factor), total, place)
            with cgutils.for_range(b, dim, intp=LONG) as loop:
                row = b.mul(loop.index, constant(lanes))
                for place, factor in zip(places, shrink, strict=True):
                    index = b.add(row, place)
                    store(b, b.fmul(load(b, out, index), factor), out, index)
        sums = [cgutils.alloca_once_value(b, load(b, total, place)) for place in places]

        def weight_of(key: Any, i: int) -> Any:
            index = b.add(b.mul(key, constant(lanes)), places[i])
            weight = power_of_2(b, b.fsub(load(b, scores, index), new[i]))
            b.store(b.fadd(b.load(sums[i]), weight), sums[i])
            return weight

        if stored.paired:
            with b.if_then(b.trunc(count, ir.IntType(1))):  # the last key has no other
                for place in places:
                    index = b.add(b.mul(count, constant(lanes)), place)
                    store(b, everywhere(float("-inf")), scores, index)
            with counting(b, 0, count, 2) as key:
                following = b.add(key, constant(1))
                row = b.mul(b.lshr(key, constant(1)), constant(lanes))
                for i, place in enumerate(places):
                    pair = in_pairs(b, weight_of(key, i), weight_of(following, i))
                    store(b, pair, scores, b.add(row, place))
        else:
            with cgutils.for_range(b, count, intp=LONG) as loop:
                row = b.mul(loop.index, constant(lanes))
                for i, place in enumerate(places):
                    store(b, weight_of(loop.index, i), scores, b.add(row, place))
        for place, mine in zip(places, sums, strict=True):
            store(b, b.load(mine), total, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def gather(
    typing: Any,
    vectors: Any,
    pages: Any,
    weights: Any,
    values: Any,
    at: Any,
    count: Any,
    out: Any,
    dim: Any,
    room: Any,
    fresh: Any,
) -> Any:
    """``out [dim, lanes] +=`` a tile's values, each times its weights, as ``weigh`` made them.

    Value t is ``dim`` numbers, an even count, from number ``at[t]`` of ``values`` on. ``room`` is
    for the values of pairs of keys, ``[TILE / 2, dim, 2]`` in bfloat16, or for tiles, as in
    ``scores``.
    """
    wide = vectors.literal_value
    together = 16 if wide == 1 else 8 if 8 * wide <= SUMS else 4
    stored = Stored(pages)
    signature = types.void(types.IntegerLiteral(wide), pages, *[types.int64] * 8)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, weights, values, at, count, out, dim, room, fresh = arguments
        lanes = wide * LANES
        keys = b.lshr(b.add(count, constant(1)), constant(1)) if stored.paired else count

        def elements(first: Any, number: int) -> None:
            sums = []
            for j in range(number):
                row = b.mul(b.add(first, constant(j)), constant(lanes))
                sums.append(
                    [
                        cgutils.alloca_once_value(b, load(b, out, b.add(row, constant(i * LANES))))
                        for i in range(wide)
                    ]
                )

            def value(t: Any) -> None:
                row = b.mul(t, constant(lanes))
                here = [load(b, weights, b.add(row, constant(i * LANES))) for i in range(wide)]
                # Constants come last, or each sum takes a register for its address.
                if stored.paired:
                    place = b.add(b.mul(t, dim), first)
                    start = b.add(room, b.shl(place, constant(2)))
                    for j, mine in enumerate(sums):
                        couple_in(b, mine, here, splat(b, b.load(at_float(b, start, constant(j)))))
                    return
                start = stored.place(b, values, b.add(load_long(b, at, t), first))
                if stored.half:
                    for j in range(0, number, 2):  # number is even
                        pair = stored.pair(b, start, constant(j))
                        for mine, factor in zip(sums[j : j + 2], pair, strict=True):
                            multiply_by(b, mine, here, factor)
                    return
                for j, mine in enumerate(sums):
                    multiply_in(b, mine, here, b.load(at_float(b, start, constant(j))))

            unrolled(b, keys, value)
            for j, mine in enumerate(sums):
                row = b.mul(b.add(first, constant(j)), constant(lanes))
                for i, each in enumerate(mine):
                    store(b, b.load(each), out, b.add(row, constant(i * LANES)))

        def by_tiles() -> None:
            tile_gather(b, wide, stored, weights, values, at, TILE, count, out, dim, room, fresh)

        def by_vectors() -> None:
            if stored.paired:
                with counting(b, 0, keys, 1) as t:
                    twice = b.shl(t, constant(1))
                    pair = [
                        stored.place(b, values, load_long(b, at, b.add(twice, constant(i))))
                        for i in range(2)
                    ]
                    to = b.add(room, b.shl(b.mul(t, dim), constant(2)))
                    couple_lines(b, stored, pair, dim, to)
            whole = b.mul(b.sdiv(dim, constant(together)), constant(together))
            with counting(b, 0, whole, together) as first:
                elements(first, together)
            with counting(b, whole, dim, 2) as first:
                elements(first, 2)

        _either(b, stored, dim, by_tiles, by_vectors)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def lay_across(
    typing: Any, pages: Any, lanes: Any, sources: Any, count: Any, factor: Any, out: Any
) -> Any:
    """``LANES`` lines of numbers become ``LANES`` columns of queries, as ``scores`` reads them.

    ``sources`` are the addresses of the lines, int64; ``count`` is a multiple of ``LANES``. All is
    multiplied by ``factor``, a float32.
    """
    stored = Stored(pages)
    signature = types.void(pages, *[types.int64] * 3, types.float32, types.int64)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, lanes, sources, count, factor, out = arguments
        factors = splat(b, factor)
        with counting(b, 0, count, LANES) as first:
            lines = [load(b, load_long(b, sources, constant(i)), first) for i in range(LANES)]
            columns = [b.fmul(column, factors) for column in transposed(b, lines)]
            if stored.paired:
                first = b.lshr(first, constant(1))
                columns = [
                    in_pairs(b, one, other)
                    for one, other in zip(columns[::2], columns[1::2], strict=True)
                ]
            for i, column in enumerate(columns):
                store(b, column, out, b.mul(b.add(first, constant(i)), lanes))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def lay_along(typing: Any, lanes: Any, columns: Any, count: Any, factors: Any, targets: Any) -> Any:
    """``LANES`` columns of ``columns [count, lanes]`` become lines at the addresses ``targets``.

    Each is multiplied by its own of ``factors [LANES]``. ``count`` is a multiple of ``LANES``.
    """
    signature = types.void(*[types.int64] * 5)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        lanes, columns, count, factors, targets = arguments
        scale = load(b, factors, constant(0))
        with counting(b, 0, count, LANES) as first:
            rows = [
                b.fmul(load(b, columns, b.mul(b.add(first, constant(i)), lanes)), scale)
                for i in range(LANES)
            ]
            for i, line in enumerate(transposed(b, rows)):
                store(b, line, load_long(b, targets, constant(i)), first)
        return context.get_dummy_value()

    return signature, generate
