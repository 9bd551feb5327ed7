"""How compiled code reads and writes the numbers of a page: float32, or bfloat16 as its 16 bits.

A number in bfloat16 is the upper half of one in float32: a page in bfloat16 takes half of the
memory, and reading it is a shift. All sums stay in float32. Arrays of such numbers are uint16,
since numba and numpy have no bfloat16.

Where the processor multiplies pairs of bfloat16 (``code.pairs``), pages in bfloat16 are multiplied
as they are, and what they are multiplied with is rounded to bfloat16, too: queries, and the weights
of softmax. These are powers of 2 below a maximum, which is then a whole number: its tile, and the
items into which a row's keys are divided, change a weight by a power of 2 and not its rounding.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from coppice.kernels.cpu.code.pairs import HAS_PAIRS
from coppice.kernels.cpu.code.simd import (
    FLOAT,
    INT,
    INTS,
    LANES,
    VECTOR,
    call,
    constant,
    load,
    splat,
)
from coppice.kernels.cpu.code.tiles import HAS_TILES

SHORT = ir.IntType(16)
_SHORTS = ir.VectorType(SHORT, LANES)
_UPPER = 0xFFFF0000


class Stored:
    """LLVM's operations on the numbers of pages, an array of the numba type ``pages``."""

    def __init__(self, pages: Any) -> None:
        self.half = pages.dtype == types.uint16
        #: Whether pages are multiplied in pairs of bfloat16.
        self.paired = self.half and HAS_PAIRS
        #: Whether that goes by tiles, where many lanes are at work.
        self.tiled = self.paired and HAS_TILES

    def place(self, b: Any, address: Any, index: Any) -> Any:
        """The address of the number with that index."""
        return b.add(address, b.shl(index, constant(1 if self.half else 2)))

    def highest(self, b: Any, maximum: Any) -> Any:
        """The maximum under which scores become weights, of a vector of maxima."""
        return call(b, "ceil", maximum) if self.paired else maximum

    def couple(self, b: Any, address: Any, index: Any) -> Any:
        """Two numbers of a page in bfloat16 from that index on, in all lanes, as a pair."""
        both = b.load(b.inttoptr(self.place(b, address, index), FLOAT.as_pointer()))
        both.align = 2
        return splat(b, both)

    def couples(self, b: Any, address: Any, index: Any) -> Any:
        """``2 * LANES`` numbers of a page in bfloat16 from that index on, as pairs."""
        return load(b, self.place(b, address, index), constant(0))

    def beside(self, b: Any, lines: list[Any], index: Any) -> Any:
        """Pairs of the numbers of two lines of a page in bfloat16, from that index on."""
        low, high = (self.shorts(b, line, index) for line in lines)
        return b.bitcast(b.or_(low, b.shl(high, ir.Constant(INTS, [16] * LANES))), VECTOR)

    def shorts(self, b: Any, address: Any, index: Any) -> Any:
        """``LANES`` numbers of a page in bfloat16, each the lower half of 32 bits."""
        numbers = b.load(b.inttoptr(self.place(b, address, index), _SHORTS.as_pointer()))
        numbers.align = 2
        return b.zext(numbers, INTS)

    def vector(self, b: Any, address: Any, index: Any) -> Any:
        """``LANES`` numbers from that index on, as float32."""
        if not self.half:
            return load(b, address, index)
        upper = b.shl(self.shorts(b, address, index), ir.Constant(INTS, [16] * LANES))
        return b.bitcast(upper, VECTOR)

    def pair(self, b: Any, address: Any, index: Any) -> tuple[Any, Any]:
        """Two numbers of a page in bfloat16 from that index on, each in all lanes, as float32."""
        both = b.load(b.inttoptr(self.place(b, address, index), INT.as_pointer()))
        both.align = 2
        # One broadcast of both, then a shift and a mask of whole vectors.
        lanes = b.bitcast(splat(b, b.bitcast(both, FLOAT)), INTS)
        low = b.shl(lanes, ir.Constant(INTS, [16] * LANES))
        high = b.and_(lanes, ir.Constant(INTS, [_UPPER] * LANES))
        return b.bitcast(low, VECTOR), b.bitcast(high, VECTOR)


@intrinsic
def put(typing: Any, pages: Any, index: Any, value: Any) -> Any:
    """``pages[index] = value``, a float32, rounded to nearest even where pages are bfloat16."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, b, arguments[0])
        place = b.gep(array.data, [arguments[1]])
        value = arguments[2]
        if pages.dtype == types.uint16:
            bits = b.bitcast(value, INT)
            odd = b.and_(b.lshr(bits, ir.Constant(INT, 16)), ir.Constant(INT, 1))
            rounded = b.add(bits, b.add(odd, ir.Constant(INT, 0x7FFF)))
            # By its bits: fast comparisons may take it that there is no NaN.
            magnitude = b.and_(bits, ir.Constant(INT, 0x7FFFFFFF))
            nan = b.icmp_unsigned(">", magnitude, ir.Constant(INT, 0x7F800000))
            upper = b.lshr(
                b.select(nan, ir.Constant(INT, 0x7FC00000), rounded), ir.Constant(INT, 16)
            )
            value = b.trunc(upper, SHORT)
        b.store(value, place)
        return context.get_dummy_value()

    if not (isinstance(pages, types.Array) and pages.ndim == 1 and pages.layout == "C"):
        return None
    return types.void(pages, types.int64, types.float32), generate
