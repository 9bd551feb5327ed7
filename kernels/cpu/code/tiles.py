"""Tiles (AMX): registers of 16 rows of 64 bytes, and the processor's products of two of them.

One instruction multiplies 16 rows of 32 numbers of bfloat16 with 16 columns, or 16 rows of 64 bytes
with 16 columns, and adds to 16 x 16 sums: 16 times the multiplications of an instruction of AVX-512
in about the time of eight of those. A column's numbers lie as products of pairs, or of four bytes,
read them: two (four) of each column side by side, one row of a tile after the other. Sums of
bfloat16 are float32's, to nearest, denormal numbers as zeros; those of bytes are exact. A row's
sums depend on no other row, and on no other column.

Before its first tile a thread configures them, ``configure``, and afterwards it lets go of them,
``release``: the system then need not keep 8 KB when it switches threads. A tile is named by its
number, 0 to 7. ``b`` is the IR builder; all addresses are int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.processor import path_of

#: Whether products of bfloat16 go by tiles.
HAS_TILES = path_of("bfloat16") == "amx"
#: Whether products of int8 do.
HAS_BYTE_TILES = path_of("int8") == "amx"
_USED = HAS_TILES or HAS_BYTE_TILES
#: Rows of a tile, and bytes of a row.
TILE_ROWS, TILE_BYTES = 16, 64
_TILES = 8
_BYTE = ir.IntType(8)
_POINTER, _LONG = _BYTE.as_pointer(), ir.IntType(64)
# In the 64 bytes of a configuration: bytes of a row of each tile (16 bits), and rows of each.
_WIDTHS, _HEIGHTS = 16, 48


def configuration(rows: int, *few: int) -> np.ndarray:
    """The 64 bytes by which ``configure`` gives the tiles ``few`` that many rows, others 16."""
    made = np.zeros(64, np.uint8)
    made[0] = 1  # the palette of eight tiles
    for tile in range(_TILES):
        made[_WIDTHS + 2 * tile] = TILE_BYTES
        made[_HEIGHTS + tile] = rows if tile in few else TILE_ROWS
    return made


def _run(b: Any, name: str, *values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), values)


def _number(tile: int) -> Any:
    return ir.Constant(_BYTE, tile)


def clear_tile(b: Any, tile: int) -> None:
    _run(b, "tilezero", _number(tile))


def load_tile(b: Any, tile: int, address: Any, stride: Any, *, once: bool = False) -> None:
    """Rows that lie ``stride`` bytes apart; ``once``: the first cache is to keep other lines."""
    name = "tileloaddt164" if once else "tileloadd64"
    _run(b, name, _number(tile), b.inttoptr(address, _POINTER), stride)


def store_tile(b: Any, tile: int, address: Any, stride: Any) -> None:
    _run(b, "tilestored64", _number(tile), b.inttoptr(address, _POINTER), stride)


def multiply_tiles(b: Any, sums: int, rows: int, columns: int, *, bytes_: bool = False) -> None:
    """Adds to the tile ``sums`` the rows of a tile times the columns of another one.

    ``bytes_``: rows of unsigned bytes and columns of signed ones, sums of int32; else numbers of
    bfloat16, sums of float32.
    """
    name = "tdpbusd" if bytes_ else "tdpbf16ps"
    _run(b, name, _number(sums), _number(rows), _number(columns))


@intrinsic
def configure(typing: Any, address: Any) -> Any:
    """Gives this thread's tiles the shapes of a ``configuration`` at that address."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if not _USED:  # nobody calls it; LLVM would call a function that is not there
            return context.get_dummy_value()
        _run(b, "ldtilecfg", b.inttoptr(arguments[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release(typing: Any) -> Any:
    """Lets go of this thread's tiles."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if _USED:
            _run(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate
