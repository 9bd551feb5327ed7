"""The tiles of Triton kernels: how much work a program holds at once, by type and width.

The sizes are those that ``tests/kernels/triton/test_compiles.py`` finds free of spills on sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    """``queries`` packed rows by ``keys`` keys at a time, computed by ``warps`` warps.

    ``stages`` tiles of keys are in flight. ``resident`` programs fit on a multiprocessor, by their
    registers and shared memory. A program computes this number of KV ``heads``.
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

    ``few`` has the 16 rows of the smallest tensor-core product, or more where a KV head has more
    query heads. ``many`` has the rows that prefill and widely shared stretches fill: a warp group
    multiplies 64 at once.
    """

    few: Tile
    many: Tile


def choose_tiles(
    head_dim: int, itemsize: int, group: int = 1, *, deterministic: bool = False
) -> Tiles:
    """The tiles for heads of this width, queries of ``itemsize`` bytes, ``group`` to a KV head.

    Float32 products run outside the tensor cores, which would round their inputs, and need many
    registers, so their tiles are small. ``deterministic``: one tile for all items.
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
    # As many rows as one row's heads take, so that decoding reads a key once for all of them.
    if itemsize < 4 and group > 32:
        wide = Tile(64, 64, 4, 3, 2) if head_dim <= 128 else tiles.many
        tiles = replace(tiles, few=wide)
    elif itemsize < 4 and group > 16:
        tiles = replace(tiles, few=replace(tiles.few, queries=32, resident=2))
    return Tiles(tiles.many, tiles.many) if deterministic else tiles


def head_blocks(head_dim: int, queries: int, *, eight_bits: bool = False) -> tuple[int, int]:
    """The powers of two, at least 16, into which products divide a head; the second may be 0.

    80 is (64, 16) and 96 (64, 32): 0.63 and 0.75 of the products of 128. A head is divided only
    from 64 rows on, where warp groups multiply. In smaller tiles every warp would compute both
    products in turn; and decoding waits for memory, from which the padding of a head is not read.
    ``eight_bits``: keys are 8-bit floats, whose heads are never divided.
    """
    whole = max(16, 2 ** (head_dim - 1).bit_length())
    first = whole // 2
    rest = max(16, 2 ** max(head_dim - first - 1, 0).bit_length())
    # The ptxas of CUDA 12.8 compiles the second product of converted values wrong. It reads uniform
    # registers that nothing wrote, as the place of a tile's values after its first 16 keys.
    if queries >= 64 and first >= 16 and first + rest < whole and not eight_bits:
        return first, rest
    return whole, 0


@dataclass(frozen=True, slots=True)
class ProductTile:
    """``rows`` by ``columns`` results of a matrix product, from ``step`` inputs at a time."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


def product_tile(itemsize: int) -> ProductTile:
    """The one tile of products whose results must not depend on the number of rows.

    In 16 bits it has 64 rows, the fewest that a warp group multiplies at once; a product of few
    rows takes the time of reading the weight anyway.
    """
    return ProductTile(32, 32, 32, 4, 2) if itemsize == 4 else ProductTile(64, 128, 64, 4, 4)


def expert_tile(itemsize: int, rows: float, *, deterministic: bool) -> ProductTile:
    """The tile of products with experts' weights, of which each has ``rows`` rows on average.

    Experts with few rows take the time of reading their weights: then it has the 16 rows of the
    smallest tensor-core product. ``deterministic``: one tile for all.
    """
    if itemsize == 4:
        return ProductTile(16, 32, 32, 4, 2)
    few = ProductTile(16, 64, 64, 4, 4)
    return few if rows < 16 and not deterministic else ProductTile(64, 64, 64, 4, 3)
