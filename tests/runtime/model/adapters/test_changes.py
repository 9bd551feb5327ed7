"""Products of adapters: compiled and by torch, beside the definition; each row by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coppice.kernels.cpu.layer.matmul.low_rank import low_rank_kernels
from coppice.runtime.model.adapters.changes import (
    ActingRows,
    DenseProducts,
    Products,
    RowProducts,
    StepChanges,
)
from coppice.runtime.model.adapters.matrices import Piece
from coppice.runtime.model.adapters.projections import Part

WIDTHS = {"qkv": 40, "output": 24}
INPUTS = 136


def pieces(seed: int, *ranks: int) -> list[Piece]:
    """Of two parts of a projection, of which the first has the columns before the second's."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for first, outputs, rank in zip((0, 24), (24, 8), ranks, strict=False):
        part = Part(3, "qkv", INPUTS, first, outputs)
        down, up = torch.empty(rank, INPUTS), torch.empty(rank, outputs)
        found.append(
            Piece(part, down.normal_(generator=generator), up.normal_(generator=generator))
        )
    return found


ADAPTERS = {4: pieces(1, 5, 8), 7: pieces(2, 1), 9: pieces(3, 4, 2), 11: []}


Made = tuple[Products, dict[int, Any]]


def made(kind: str) -> Made:
    """Products, and what they made of each adapter."""
    products: Products = DenseProducts(torch.float32, torch.device("cpu"))
    if kind == "rows":
        kernels = low_rank_kernels()
        if kernels is None:
            pytest.skip("needs numba")
        products = RowProducts(kernels)
    return products, {n: products.prepare(each, WIDTHS) for n, each in ADAPTERS.items()}


def apply(with_: Made, numbers: list[int], x: torch.Tensor) -> torch.Tensor:
    products, adapters = with_
    acting = ActingRows.of(np.array(numbers))
    y = torch.ones(len(x), WIDTHS["qkv"])
    if acting is None:
        return y
    matrices = [adapters[each] for each in acting.adapters]
    changes = StepChanges(products.step(matrices, acting.adapters), acting, acting)
    assert torch.equal(changes.of_layer(2)("qkv", x, y.clone()), y)
    return changes.of_layer(3)("qkv", x, y)


@pytest.mark.parametrize("kind", ["rows", "dense"])
@pytest.mark.parametrize("count", [1, 3, 300])
def test_each_row_gets_the_product_of_its_adapter(kind: str, count: int) -> None:
    numbers = [(4, -1, 9, 7, 11)[n * 7 % 5] for n in range(count)]
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(count))
    expected = torch.ones(count, WIDTHS["qkv"])
    for row, number in enumerate(numbers):
        for piece in ADAPTERS.get(number, []):
            part = piece.part
            target = expected[row, part.first : part.first + part.outputs]
            target += x[row] @ piece.down.t() @ piece.up
    found = apply(made(kind), numbers, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    products = made("rows")
    x = torch.randn(300, INPUTS, generator=torch.Generator().manual_seed(8))
    numbers = [(4, -1, 9, 7)[n * 7 % 4] for n in range(300)]
    together = apply(products, numbers, x)
    for row in (0, 2, 3, 150, 299):
        assert torch.equal(apply(products, [numbers[row]], x[row : row + 1])[0], together[row])


def test_rows_are_grouped_by_adapter_and_chosen() -> None:
    acting = ActingRows.of(np.array([9, -1, 4, 9, 4, -1]))
    assert acting is not None
    assert acting.adapters == (4, 9)
    assert acting.rows.tolist() == [2, 4, 0, 3]
    assert acting.groups.tolist() == [0, 0, 1, 1]
    chosen = acting.among(np.array([5, 4, 3]))
    assert (chosen.rows.tolist(), chosen.groups.tolist()) == ([1, 2], [0, 1])
    assert len(acting.among(np.array([1, 5])).rows) == 0
    assert len(acting.among(np.zeros(0, np.int64)).rows) == 0
    assert ActingRows.of(np.array([-1, -1])) is None
