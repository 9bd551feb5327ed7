"""Products of weights in groups by the processor's products of four bytes, panel by panel.

As in ``int8_panels``, four unsigned bytes are multiplied with four signed ones in each lane,
exactly. Here the weights are the unsigned side: levels of 4 bits, of which an instruction or two
make bytes, or of 8 bits. Rows are rounded to 127 levels of the largest number of each chunk,
which is a group of the weight or divides it. A chunk's int32 sum becomes a float32, is multiplied
by the factors of the weight's group and of the row's chunk, and added; the offset of a group is
added once for the sum of the row's levels in a chunk. Sums over chunks are in order, so a result
depends on its row and nothing else.

A step of one sequence takes the time of reading its weights, and 4 bits with a factor and an offset
of 16 bits for 32 are 5 bits, where int8 has 8.

To import this module on a processor with neither VNNI nor AVX2 is an ``ImportError``;
``level_numba`` has the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.fours import MOST_SMALL, fours_of
from coppice.kernels.cpu.code.kept import cfunc
from coppice.kernels.cpu.code.memory import room_for
from coppice.kernels.cpu.code.processor import compiled_path
from coppice.kernels.cpu.code.simd import FETCHED_FROM, ROWS, prefetch
from coppice.kernels.cpu.layer.matmul.grouped import BLOCK, Grouped
from coppice.kernels.cpu.layer.matmul.row_blocks import GROUPED, Panels

_FOURS = fours_of(compiled_path("int4"))
#: Lanes of int32 in a register.
LANES = _FOURS.lanes
_WIDE = 3
#: Outputs of a panel.
PANEL = _WIDE * LANES
_LINE = 64
# Up to so many rows, which wait for memory, what is so many bytes ahead is fetched to the first
# cache: one row takes 1.2 to 1.4 times less than with the next panel in the second one, where it
# waits again. Where weights come as they are read the second cache is better: layers of a step of
# one row took 0.85 of the time on one thread, and about as long on two. Their loops over groups of
# one block are unrolled; with more rows sums would be spilled.
_FEW = 2
_AHEAD = 8640
#: Numbers at the begin of a packed weight: bits of a level, inputs of a group, whether there are
#: offsets, bytes of a panel.
HEADER = 8
# Numbers and addresses that ``run_panels`` is given.
_FRAME = 10

_INT, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, LANES), ir.VectorType(_FLOAT, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
# The products of a block are added in 16 bits where levels have 4 and none takes four bytes.
assert BLOCK // 4 <= MOST_SMALL


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroups:
    """A weight in panels: ``memory`` uint8, a header and the panels, one after the other.

    A panel has its groups, one after the other, so that all is read in order: a group's levels,
    four inputs of each of ``PANEL`` outputs side by side (of 4 bits eight, two in a byte), then its
    factors, float16 ``[PANEL]``, then its offsets, likewise, filled up to whole cache lines.
    """

    out_features: int
    in_features: int
    address: int
    memory: np.ndarray


def pack(weight: Grouped) -> PackedGroups | None:
    """A weight with factors and offsets of float16 in panels, N filled up to whole ones; O(N K).

    None where ``BLOCK`` does not divide a group, and where there are no numbers.
    """
    width, inner = weight.shape
    if not width or not inner or weight.group % BLOCK:
        return None
    panels, groups = -(-width // PANEL), inner // weight.group
    words = inner * weight.bits // 32
    scales = [weight.factors] if weight.offsets is None else [weight.factors, weight.offsets]
    size = words // groups * PANEL * 4 + len(scales) * PANEL * 2
    size = -(-size // _LINE) * _LINE * groups
    memory = room_for(8 * HEADER + panels * size).numpy()
    memory[:] = 0
    memory[: 8 * HEADER].view(np.int64)[:4] = (
        weight.bits, weight.group, len(scales) - 1, size,
    )  # fmt: skip
    rows = memory[8 * HEADER :].reshape(panels, groups, size // groups)
    levels_size = words // groups * PANEL * 4
    # Four bytes are moved as one number of 32 bits.
    fours = weight.levels.contiguous().numpy().view(np.int32)
    for panel in range(panels):
        mine = slice(panel * PANEL, (panel + 1) * PANEL)
        part = fours[mine]
        to = rows[panel, :, :levels_size].view(np.int32).reshape(groups, words // groups, PANEL)
        to[:, :, : len(part)] = part.T.reshape(groups, words // groups, len(part))
        at = levels_size
        for each in scales:
            kept = rows[panel, :, at : at + PANEL * 2].view(np.float16)
            kept[:, : len(part)] = each[mine].to(torch.float16).numpy().T
            at += PANEL * 2
    return PackedGroups(width, inner, memory.ctypes.data, memory)


def _at(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def _constant(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _load(b: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
    value = b.load(_at(b, b.add(address, _constant(offset)), kind))
    value.align = align
    return value


def _splat(b: Any, value: Any, kind: Any) -> Any:
    one = b.insert_element(ir.Constant(kind, ir.Undefined), value, _INT(0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


@intrinsic(prefer_literal=True)
def _multiply_panel(
    typing: Any,
    rows: Any,
    bits: Any,
    levels: Any,
    groups: Any,
    grouped: Any,
    blocks: Any,
    weights: Any,
    span: Any,
    factors: Any,
    offsets: Any,
    following: Any,
    step: Any,
    peaks: Any,
    stride: Any,
    scales: Any,
    bias: Any,
    out: Any,
    width: Any,
) -> Any:
    """``out`` float32 ``[rows, PANEL]``, rows ``width`` apart: levels times a panel, rescaled.

    ``rows`` is a constant; the others are addresses and sizes. ``levels`` int8 is a
    block of ``row_blocks``, ``[inner / 4, rows, 4]``: ``groups`` of ``grouped`` chunks of
    ``blocks`` blocks of ``BLOCK`` inputs. A group has ``factors`` and ``offsets``, of which 0 says
    that the middle level is zero. ``peaks`` is float32 ``[rows, 2 * chunks]``, rows ``stride``
    bytes apart: a chunk's factor, and the sum of its levels. ``scales`` and ``bias`` are float32
    ``[PANEL]``. With each block the next ``step`` bytes from ``following`` on are prefetched.
    """
    many = rows.literal_value
    signature = types.void(types.IntegerLiteral(many), *[types.int64] * 17)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        (
            _, bits, levels, groups, grouped, blocks, weights, span, factors, offsets, following,
            step, peaks, stride, scales, bias, out, width,
        ) = arguments  # fmt: skip
        fused_kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fused = cgutils.get_or_insert_function(b.module, fused_kind, f"llvm.fma.v{LANES}f32")
        zeros, nothing = ir.Constant(_INTS, [0] * LANES), ir.Constant(_FLOATS, [0.0] * LANES)
        low, half = (ir.Constant(_INTS, [each] * LANES) for each in (0x0F0F0F0F, 4))
        plain = b.icmp_signed("==", offsets, _constant(0))

        def widened(address: Any) -> Any:
            return b.fpext(_load(b, address, 0, _HALVES, 2), _FLOATS)

        def scaled(begin: Any, size: int) -> tuple[list[Any], list[Any]]:
            """The factors and offsets of the group at that address."""
            factor, offset = [], []
            # Without offsets the factors are read again, and not used.
            other = b.add(begin, b.select(plain, factors, offsets))
            begin = b.add(begin, factors)
            middle = ir.Constant(_FLOATS, [-float(1 << (size - 1))] * LANES)
            for i in range(_WIDE):
                factor.append(widened(b.add(begin, _constant(2 * LANES * i))))
                value = widened(b.add(other, _constant(2 * LANES * i)))
                offset.append(b.select(plain, b.fmul(factor[-1], middle), value))
            return factor, offset

        def add_block(block: Any, at: Any, size: int, sums: list[list[Any]]) -> None:
            """Adds the products of a block at an address, and prefetches a part of what follows."""
            words = BLOCK * size // 32
            # The most lines that come with a word.
            lines = -(-(BLOCK * size // 8 * PANEL + 4 * PANEL) // (_LINE * words))
            ahead = b.add(following, b.mul(block, step))
            here = b.add(levels, b.mul(block, _constant(BLOCK * many)))
            small = size == 4 and not _FOURS.whole
            nothing_small = ir.Constant(_FOURS.small_sums, [0] * (2 * LANES))
            parts = [[nothing_small] * _WIDE for _ in range(many)]

            def add(four: int, vectors: list[Any]) -> None:
                made = [] if small else [_FOURS.unsigned(b, each) for each in vectors]
                for row in range(many):
                    number = _load(b, here, 4 * (four * many + row), _INT, 4)
                    fours = _splat(b, number, _INTS)
                    if small:
                        for i, vector in enumerate(vectors):
                            parts[row][i] = _FOURS.add_small(b, parts[row][i], vector, fours)
                        continue
                    other = _FOURS.signed(b, fours)
                    for i, one in enumerate(made):
                        sums[row][i] = _FOURS.add(b, sums[row][i], one, other)

            for word in range(words):
                for i in range(lines):
                    place = b.add(ahead, _constant((word * lines + i) * _LINE))
                    prefetch(b, place, first=many <= _FEW and FETCHED_FROM == 1)
                vectors = [
                    _load(b, at, 4 * (word * PANEL + LANES * i), _INTS, 4) for i in range(_WIDE)
                ]
                if size == 8:
                    add(word, vectors)
                else:
                    add(2 * word, [b.and_(each, low) for each in vectors])
                    add(2 * word + 1, [b.and_(b.lshr(each, half), low) for each in vectors])
            if small:
                for mine, part in zip(sums, parts, strict=True):
                    mine[:] = [
                        _FOURS.add_widened(b, *each) for each in zip(mine, part, strict=True)
                    ]

        def add_chunk(
            chunk: Any, sums: list[list[Any]], scale: tuple[list[Any], list[Any]], totals: Any
        ) -> None:
            """Adds a chunk's sums, rescaled, to those of the rows."""
            for row in range(many):
                mine = b.add(peaks, b.mul(stride, _constant(row)))
                mine = b.add(mine, b.mul(chunk, _constant(8)))
                peak = _splat(b, _load(b, mine, 0, _FLOAT, 4), _FLOATS)
                level_sum = _splat(b, _load(b, mine, 4, _FLOAT, 4), _FLOATS)
                for i, total in enumerate(totals[row]):
                    value = b.fmul(b.sitofp(sums[row][i], _FLOATS), scale[0][i])
                    value = b.call(fused, (scale[1][i], level_sum, value))
                    b.store(b.call(fused, (value, peak, b.load(total))), total)

        def work(size: int, *, single: bool) -> None:
            """The product; ``single``: of groups of one block, without loops within them."""
            totals = [
                [cgutils.alloca_once_value(b, nothing) for _ in range(_WIDE)] for _ in range(many)
            ]
            kept = [[cgutils.alloca_once(b, _INTS) for _ in range(_WIDE)] for _ in range(many)]
            with cgutils.for_range(b, groups, intp=_LONG) as group:
                begin = b.add(weights, b.mul(group.index, span))
                if single:
                    sums = [[zeros] * _WIDE for _ in range(many)]
                    add_block(group.index, begin, size, sums)
                    add_chunk(group.index, sums, scaled(begin, size), totals)
                else:
                    scale = scaled(begin, size)
                    with cgutils.for_range(b, grouped, intp=_LONG) as inside:
                        chunk = b.add(b.mul(group.index, grouped), inside.index)
                        for each in (place for mine in kept for place in mine):
                            b.store(zeros, each)
                        with cgutils.for_range(b, blocks, intp=_LONG) as block:
                            number = b.add(b.mul(inside.index, blocks), block.index)
                            at = b.mul(number, _constant(BLOCK * size // 8 * PANEL))
                            sums = [[b.load(each) for each in mine] for mine in kept]
                            number = b.add(b.mul(chunk, blocks), block.index)
                            add_block(number, b.add(begin, at), size, sums)
                            for mine, places in zip(sums, kept, strict=True):
                                for value, place in zip(mine, places, strict=True):
                                    b.store(value, place)
                        sums = [[b.load(each) for each in mine] for mine in kept]
                        add_chunk(chunk, sums, scale, totals)
            for row, mine in enumerate(totals):
                to = b.add(out, b.mul(width, _constant(4 * row)))
                for i, total in enumerate(mine):
                    scale = _load(b, scales, 4 * LANES * i, _FLOATS, 4)
                    added = _load(b, bias, 4 * LANES * i, _FLOATS, 4)
                    place = _at(b, b.add(to, _constant(4 * LANES * i)), _FLOATS)
                    b.store(b.call(fused, (b.load(total), scale, added)), place).align = 4

        alone = b.icmp_signed("==", b.mul(grouped, blocks), _constant(1))
        for size in (4, 8):
            with b.if_then(b.icmp_signed("==", bits, _constant(size))):
                if many > _FEW:
                    work(size, single=False)
                else:
                    with b.if_else(alone) as (yes, no):
                        with yes:
                            work(size, single=True)
                        with no:
                            work(size, single=False)
        return context.get_dummy_value()

    return signature, generate


@cfunc(types.void(*[types.int64] * 3), error_model="numpy")
def run_panels(frame: int, begin: int, end: int) -> None:
    """Panels ``begin .. end`` of what ``level_numba.multiply_rows`` has laid out in a frame."""
    f = carray(pointer(frame), (_FRAME,), np.int64)
    rows, inner, width = f[0], f[1], f[2]
    header = carray(pointer(f[5]), (HEADER,), np.int64)
    bits, group, size, chunk = header[0], header[1], header[3], f[9]
    groups, grouped, blocks = inner // group, group // chunk, chunk // BLOCK
    stride, span = 8 * (inner // chunk), size // groups
    # Where a group's factors and offsets begin.
    factors = group * bits // 8 * PANEL
    offsets = factors + PANEL * 2 if header[2] else 0
    # What comes with each block of a panel.
    step = -(-size // (inner // BLOCK))
    biased = f[7] != 0
    # The last panel's outputs that there are, and its scales and biases.
    edge = np.empty((ROWS, PANEL), np.float32)
    edge_scales, edge_bias = np.zeros(PANEL, np.float32), np.zeros(PANEL, np.float32)
    for panel in range(begin, end):
        weights = f[5] + 8 * HEADER + panel * size
        first = panel * PANEL
        count = min(PANEL, width - first)
        whole = count == PANEL
        scales, bias = f[6] + 4 * first, f[7] + 4 * first
        if not whole:
            edge_scales[:count] = carray(pointer(scales), (count,), np.float32)
            scales = edge_scales.ctypes.data
            if biased:
                edge_bias[:count] = carray(pointer(bias), (count,), np.float32)
        if not (whole and biased):
            bias = edge_bias.ctypes.data
        row = 0
        while row < rows:
            start, peaks = f[3] + row * inner, f[4] + stride * row
            # While the first rows are worked with this panel the next one comes; to fetch what lies
            # behind the last one does no harm.
            following, ahead = start, 0
            if row == 0 and rows < 2 * _FEW:
                following, ahead = weights + _AHEAD, step
            elif row == 0 and panel + 1 < end:
                following, ahead = weights + size, step
            to, apart = f[8] + 4 * (row * width + first), width
            if not whole:
                to, apart = edge.ctypes.data, PANEL
            left = rows - row
            # The first argument is a constant of what is compiled.
            if ROWS == 8 and left >= 8:
                many = 8
                _multiply_panel(
                    8, bits, start, groups, grouped, blocks, weights, span, factors, offsets,
                    following, ahead, peaks, stride, scales, bias, to, apart,
                )  # fmt: skip
            elif left >= 4:
                many = 4
                _multiply_panel(
                    4, bits, start, groups, grouped, blocks, weights, span, factors, offsets,
                    following, ahead, peaks, stride, scales, bias, to, apart,
                )  # fmt: skip
            elif left >= 2:
                many = 2
                _multiply_panel(
                    2, bits, start, groups, grouped, blocks, weights, span, factors, offsets,
                    following, ahead, peaks, stride, scales, bias, to, apart,
                )  # fmt: skip
            else:
                many = 1
                _multiply_panel(
                    1, bits, start, groups, grouped, blocks, weights, span, factors, offsets,
                    following, ahead, peaks, stride, scales, bias, to, apart,
                )  # fmt: skip
            if not whole:
                for i in range(many):
                    out = carray(
                        pointer(f[8] + 4 * ((row + i) * width + first)), (count,), np.float32
                    )
                    out[:] = edge[i, :count]
            row += many
    edge[0, 0] = edge_scales[0] = edge_bias[0] = 0


def product() -> Panels:
    """The product of panels for compiled code."""
    return Panels(run_panels.address, PANEL, GROUPED)
