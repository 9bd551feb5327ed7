"""How much of the work a program of the Triton attention kernel holds at once, by type and width.

The sizes are those that ``tests/kernels/test_triton_compiles.py`` finds free of spills on sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """``queries`` packed rows by ``keys`` keys at a time, computed by ``warps`` warps.

    ``stages`` tiles of keys are in flight. ``resident`` programs fit on a multiprocessor, by their
    registers and shared memory. A program works so many KV ``heads``.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    resident: int
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile of items with few packed queries (decoding) and that of the others.

    ``few`` has the 16 rows of the smallest tensor-core product. ``many`` has the rows that prefill
    and widely shared stretches fill: a warp group multiplies 64 at once.
    """

    few: Tile
    many: Tile


def choose_tiles(head_dim: int, itemsize: int, *, deterministic: bool = False) -> Tiles:
    """The tiles for heads that wide and queries of ``itemsize`` bytes.

    Float32 products run outside the tensor cores, whose rounding of float32 is not wanted, and hold
    much in registers: its tiles are small. ``deterministic`` has one tile for everything.
    """
    if itemsize == 4:
        if head_dim <= 64:
            tiles = Tiles(Tile(16, 32, 4, 2, 3), Tile(32, 32, 4, 2, 2))
        elif head_dim <= 128:
            tiles = Tiles(Tile(16, 32, 8, 2, 3), Tile(32, 16, 8, 2, 3))
        else:
            tiles = Tiles(Tile(16, 16, 8, 2, 3), Tile(16, 16, 8, 2, 3))
    elif head_dim <= 128:
        tiles = Tiles(Tile(16, 64, 4, 3, 3), Tile(128, 64, 8, 3, 1))
    else:
        tiles = Tiles(Tile(16, 32, 4, 3, 3), Tile(64, 64, 8, 2, 1))
    return Tiles(tiles.many, tiles.many) if deterministic else tiles
