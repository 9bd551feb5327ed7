"""Products of four bytes: by an instruction of their own (VNNI), or by pairs of 16 bits (AVX2).

``vpdpbusd`` multiplies four unsigned bytes with four signed ones in each lane of 32 bits and adds
the four products to an int32, exactly. Without it the bytes at even places are widened to 16 bits,
those at odd places too, and ``vpmaddwd`` multiplies and adds pairs of these: the same sums by two
multiplications and two additions. ``vpmaddubsw`` multiplies bytes as they are, but its sums have 16
bits: it takes unsigned bytes of 4 bits, of which a few products together fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

_BYTE, _SHORT, _INT = ir.IntType(8), ir.IntType(16), ir.IntType(32)
# Lanes of int32 in a register, by path.
_LANES = {"amx": 16, "avx512vnni": 16, "avxvnni": 8, "avx2": 8}

#: Products of four bytes, the unsigned ones of 4 bits, whose sum `Fours.add_small` can hold.
MOST_SMALL = 32767 // (2 * 15 * 127)


@dataclass(frozen=True, slots=True)
class Fours:
    """How vectors of bytes are multiplied, four by four; ``b`` is the IR builder.

    Attributes:
        lanes: of int32 in a register; bytes come as such numbers.
        whole: whether an instruction takes four bytes at once.
    """

    lanes: int
    whole: bool

    @property
    def sums(self) -> Any:
        """The type of a vector of sums."""
        return ir.VectorType(_INT, self.lanes)

    @property
    def small_sums(self) -> Any:
        """The type of the sums of ``add_small``."""
        return ir.VectorType(_SHORT, 2 * self.lanes)

    def unsigned(self, b: Any, fours: Any) -> tuple[Any, ...]:
        """Four unsigned bytes in each lane, as ``add`` takes them."""
        if self.whole:
            return (b.bitcast(fours, self._bytes),)
        pairs, half = b.bitcast(fours, self.small_sums), self._everywhere(8)
        return b.and_(pairs, self._everywhere(0xFF)), b.lshr(pairs, half)

    def signed(self, b: Any, fours: Any) -> tuple[Any, ...]:
        """Four signed bytes in each lane, as ``add`` takes them."""
        if self.whole:
            return (b.bitcast(fours, self._bytes),)
        pairs, half = b.bitcast(fours, self.small_sums), self._everywhere(8)
        return b.ashr(b.shl(pairs, half), half), b.ashr(pairs, half)

    def add(self, b: Any, sums: Any, unsigned: tuple[Any, ...], signed: tuple[Any, ...]) -> Any:
        """``sums`` int32 and, in each lane, the products of four bytes."""
        if self.whole:
            kind = ir.FunctionType(self.sums, [self.sums, self._bytes, self._bytes])
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            function = cgutils.get_or_insert_function(b.module, kind, name)
            return b.call(function, (sums, *unsigned, *signed))
        products = [self._add_pairs(b, *each) for each in zip(unsigned, signed, strict=True)]
        return b.add(sums, b.add(*products))  # one addition waits for the sums before it

    def add_small(self, b: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
        """``sums`` int16 and the products of pairs of bytes, the unsigned ones below 16.

        Only where no instruction takes four at once; sums of ``MOST_SMALL`` fours fit.
        """
        kinds = ir.VectorType(_BYTE, 4 * self.lanes)
        kind = ir.FunctionType(self.small_sums, [kinds, kinds])
        name = "llvm.x86.avx2.pmadd.ub.sw"
        function = cgutils.get_or_insert_function(b.module, kind, name)
        return b.add(sums, b.call(function, (b.bitcast(unsigned, kinds), b.bitcast(signed, kinds))))

    def add_widened(self, b: Any, sums: Any, small: Any) -> Any:
        """``sums`` int32 and, in each lane, both sums of ``add_small``."""
        return b.add(sums, self._add_pairs(b, small, self._everywhere(1)))

    @property
    def _bytes(self) -> Any:
        """The type in which LLVM's function of the instruction takes the bytes."""
        by_bytes = llvm.llvm_version_info >= (21,)
        return ir.VectorType(_BYTE, 4 * self.lanes) if by_bytes else self.sums

    def _everywhere(self, number: int) -> Any:
        """A vector of that number in 16 bits."""
        return ir.Constant(self.small_sums, [number] * (2 * self.lanes))

    def _add_pairs(self, b: Any, one: Any, other: Any) -> Any:
        """In each lane, the sum of the products of its two numbers of 16 bits."""
        kind = ir.FunctionType(self.sums, [self.small_sums] * 2)
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx2.pmadd.wd")
        return b.call(function, (one, other))


def fours_of(path: str) -> Fours:
    """How a compiled path of ``processor.PATHS`` multiplies bytes."""
    return Fours(_LANES[path], path != "avx2")
