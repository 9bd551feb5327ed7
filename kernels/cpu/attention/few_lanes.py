"""A tile of attention for few query heads: vectors along the head, not across the lanes.

A row that shares no keys with others has as many query heads as share a KV head, usually two to
eight, and would leave most lanes of ``full_lanes`` idle. Here a key is read in whole vectors, and
each vector is multiplied with those of ``few`` query heads. The scores of several keys and all
lanes come out side by side, ``[keys, few]``, so that their softmax also runs in whole vectors. The
work for a key is that of its lanes, and the time of such a row remains that of reading memory.

The functions' first argument is a constant, ``few``: one of ``FEW``. ``dim`` is a multiple of
``LANES``. Of ``pages``, the layer's keys, only the type counts: that of the numbers of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from coppice.kernels.cpu.attention.full_lanes import couple_in
from coppice.kernels.cpu.attention.stored import Stored
from coppice.kernels.cpu.code.pairs import in_pairs, store_rounded
from coppice.kernels.cpu.code.simd import (
    INT,
    INTS,
    LANES,
    SUMS,
    VECTOR,
    any_of,
    at_float,
    call,
    constant,
    counting,
    everywhere,
    fetch,
    greater,
    load,
    load_long,
    multiply_in,
    power_of_2,
    splat,
    store,
    unrolled,
    zeros,
)

#: The lanes that a narrow row may have.
FEW = (LANES // 4, LANES // 2)


def _totals(b: Any, vectors: list[Any]) -> Any:
    """The sum of each of ``LANES`` vectors, side by side."""
    while len(vectors) > 1:
        even, odd = (ir.Constant(INTS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
        vectors = [
            b.fadd(b.shuffle_vector(one, other, even), b.shuffle_vector(one, other, odd))
            for one, other in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _turned(b: Any, vector: Any, by: int) -> Any:
    """A vector with its lanes rotated by a number of places."""
    lanes = ir.Constant(INTS, [(lane + by) % LANES for lane in range(LANES)])
    return b.shuffle_vector(vector, ir.Constant(VECTOR, ir.Undefined), lanes)


@intrinsic
def few_query(typing: Any, pages: Any, line: Any, factor: Any, dim: Any, out: Any) -> Any:
    """``out [dim]`` = ``line [dim]`` float32 times a factor, as ``few_scores`` reads it."""
    stored = Stored(pages)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, line, factor, dim, out = arguments
        with counting(b, 0, dim, LANES) as d:
            product = b.fmul(load(b, line, d), splat(b, factor))
            (store_rounded if stored.paired else store)(b, product, out, d)
        return context.get_dummy_value()

    return types.void(pages, types.int64, types.float32, *[types.int64] * 2), generate


@intrinsic(prefer_literal=True)
def few_scores(
    typing: Any,
    few: Any,
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
) -> Any:
    """Products of a tile's keys with few lanes, into ``out [TILE, few]``.

    ``queries`` is float32 ``[few, dim]``, in pairs bfloat16; the rest is as in
    ``full_lanes.scores``. The rows after ``count`` up to the next multiple of ``LANES // few`` are
    written, too.
    """
    lanes = few.literal_value
    together = LANES // lanes
    stored = Stored(pages)
    signature = types.void(types.IntegerLiteral(lanes), pages, *[types.int64] * 9)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, queries, keys, values, at, count, following, fetched, dim, out = arguments
        rows = [b.mul(dim, constant(lane)) for lane in range(lanes)]
        with counting(b, 0, count, together) as first:
            starts = []
            for j in range(together):
                index = b.add(first, constant(j))
                starts.append(stored.place(b, keys, load_long(b, at, index)))
                ahead = load_long(b, following, index)
                key, value = (stored.place(b, each, ahead) for each in (keys, values))
                fetch(b, key, value, fetched)
            sums = zeros(b, LANES)

            def elements(d: Any) -> None:
                asked = [load(b, queries, b.add(row, d)) for row in rows]
                for j, start in enumerate(starts):
                    key = stored.vector(b, start, d)
                    for total, query in zip(sums[j * lanes :], asked, strict=False):
                        b.store(call(b, "fmuladd", key, query, b.load(total)), total)

            def couples(d: Any, numbers: Callable[[Any, Any, Any], Any]) -> None:
                asked = [numbers(b, queries, b.add(row, d)) for row in rows]
                for j, start in enumerate(starts):
                    couple_in(b, sums[j * lanes : (j + 1) * lanes], asked, numbers(b, start, d))

            if stored.paired:
                whole = b.mul(b.sdiv(dim, constant(2 * LANES)), constant(2 * LANES))
                with counting(b, 0, whole, 2 * LANES) as d:
                    couples(d, stored.couples)
                with counting(b, whole, dim, LANES) as d:
                    couples(d, stored.shorts)  # each beside a 0
            else:
                with counting(b, 0, dim, LANES) as d:
                    elements(d)
            place = b.mul(first, constant(lanes))
            store(b, _totals(b, [b.load(total) for total in sums]), out, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def few_weigh(
    typing: Any,
    few: Any,
    pages: Any,
    scores: Any,
    vectors: Any,
    top: Any,
    total: Any,
    out: Any,
    dim: Any,
) -> Any:
    """Turns a tile's scores, in base 2, into weights under the running maximum of each lane.

    ``scores [keys, few]`` fills a number of whole ``vectors``, and there is room for one more.
    ``top`` and ``total`` ``[LANES]`` and ``out [few, dim]`` hold the state before this tile, as in
    ``full_lanes.weigh``, except that the maximum of lane n stands at each ``n + i * few``, and its
    sum of weights is the sum of the numbers at these places. Weights of pairs of keys become
    ``[few, 2]``.
    """
    lanes = few.literal_value
    stored = Stored(pages)
    signature = types.void(types.IntegerLiteral(lanes), pages, *[types.int64] * 6)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, scores, vectors, top, total, out, dim = arguments
        end, start = b.mul(vectors, constant(LANES)), constant(0)
        old = load(b, top, start)
        best = cgutils.alloca_once_value(b, old)
        with counting(b, 0, end, LANES) as index:
            b.store(greater(b, load(b, scores, index), b.load(best)), best)
        new, by = b.load(best), lanes
        while by < LANES:
            new, by = greater(b, new, _turned(b, new, by)), 2 * by
        new = stored.highest(b, new)
        with b.if_then(any_of(b, b.fcmp_ordered(">", new, old))):
            # The first tile comes here with top -inf: what it shrinks is 0.
            shrink = power_of_2(b, b.fsub(old, new))
            store(b, new, top, start)
            store(b, b.fmul(load(b, total, start), shrink), total, start)
            for lane in range(lanes):
                factor = splat(b, b.extract_element(shrink, ir.Constant(INT, lane)))
                row = b.mul(dim, constant(lane))
                with counting(b, 0, dim, LANES) as d:
                    place = b.add(row, d)
                    store(b, b.fmul(load(b, out, place), factor), out, place)
        mine = cgutils.alloca_once_value(b, load(b, total, start))

        def weight_of(index: Any) -> Any:
            weight = power_of_2(b, b.fsub(load(b, scores, index), new))
            b.store(b.fadd(b.load(mine), weight), mine)
            return weight

        if stored.paired:
            # Of an odd number of vectors the last one has another, of keys that nobody sees.
            store(b, everywhere(float("-inf")), scores, end)
            with counting(b, 0, end, 2 * LANES) as index:
                following = b.add(index, constant(LANES))
                pairs = in_pairs(b, weight_of(index), weight_of(following), lanes)
                store(b, pairs, scores, b.lshr(index, constant(1)))
        else:
            with counting(b, 0, end, LANES) as index:
                store(b, weight_of(index), scores, index)
        store(b, b.load(mine), total, start)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def few_gather(
    typing: Any,
    few: Any,
    pages: Any,
    weights: Any,
    values: Any,
    at: Any,
    count: Any,
    out: Any,
    dim: Any,
) -> Any:
    """``out [few, dim] +=`` a tile's values, each times its weights, as ``few_weigh`` made them.

    Value t is ``dim`` numbers from number ``at[t]`` of ``values`` on.
    """
    lanes = few.literal_value
    wide = max(n for n in (1, 2, 4) if n * lanes <= SUMS)
    stored = Stored(pages)
    signature = types.void(types.IntegerLiteral(lanes), pages, *[types.int64] * 6)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, weights, values, at, count, out, dim = arguments
        rows = [b.mul(dim, constant(lane)) for lane in range(lanes)]

        def elements(first: Any, number: int) -> None:
            places = [b.add(first, constant(i * LANES)) for i in range(number)]
            sums = [
                [cgutils.alloca_once_value(b, load(b, out, b.add(row, place))) for place in places]
                for row in rows
            ]

            def couple(t: Any) -> None:
                twice = b.shl(t, constant(1))
                places = [load_long(b, at, b.add(twice, constant(i))) for i in range(2)]
                lines = [stored.place(b, values, b.add(place, first)) for place in places]
                here = [stored.beside(b, lines, constant(i * LANES)) for i in range(number)]
                mine = b.add(weights, b.shl(b.mul(t, constant(lanes)), constant(2)))
                for lane, each in enumerate(sums):
                    couple_in(b, each, here, splat(b, b.load(at_float(b, mine, constant(lane)))))

            def value(t: Any) -> None:
                start = stored.place(b, values, b.add(load_long(b, at, t), first))
                here = [stored.vector(b, start, constant(i * LANES)) for i in range(number)]
                mine = b.add(weights, b.shl(b.mul(t, constant(lanes)), constant(2)))
                for lane, each in enumerate(sums):
                    multiply_in(b, each, here, b.load(at_float(b, mine, constant(lane))))

            if stored.paired:
                unrolled(b, b.lshr(b.add(count, constant(1)), constant(1)), couple)
            else:
                unrolled(b, count, value)
            for row, each in zip(rows, sums, strict=True):
                for place, total in zip(places, each, strict=True):
                    store(b, b.load(total), out, b.add(row, place))

        whole = b.mul(b.sdiv(dim, constant(wide * LANES)), constant(wide * LANES))
        with counting(b, 0, whole, wide * LANES) as first:
            elements(first, wide)
        with counting(b, whole, dim, LANES) as first:
            elements(first, 1)
        return context.get_dummy_value()

    return signature, generate
