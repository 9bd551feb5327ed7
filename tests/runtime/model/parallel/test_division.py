"""Whose part is what: all of a model, once, in parts that differ as little as they can."""

from __future__ import annotations

import pytest
import torch

from coppice.kernels.cpu.layer.matmul.grouped import rounded
from coppice.runtime.model.parallel.cut import Cut, rows
from coppice.runtime.model.parallel.division import divided, divided_heads


@pytest.mark.parametrize("width", [1, 7, 48, 320, 1536, 2880, 11008, 49152, 151936])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_widths_are_divided_without_gaps(width: int, size: int) -> None:
    if width < size:
        return
    parts = [divided(width, rank, size) for rank in range(size)]
    assert [each for part in parts for each in part] == list(range(width))
    sizes = sorted(map(len, parts))
    assert sizes[0] > 0
    assert sizes[-1] <= sizes[0] + max(1, width // size // 8), "nearly even"


def test_widths_are_multiples_that_products_like() -> None:
    assert [len(divided(1536, rank, 2)) for rank in range(2)] == [768, 768]
    assert [len(divided(320, rank, 2)) for rank in range(2)] == [160, 160]
    assert all(len(divided(11008, rank, 8)) % 32 == 0 for rank in range(8))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(8, 8, 3), (9, 3, 2), (9, 3, 4), (4, 2, 4), (32, 8, 16), (6, 1, 4)],
)
def test_heads_are_divided_with_the_keys_that_they_read(
    heads: int, kv_heads: int, size: int
) -> None:
    parts = [divided_heads(heads, kv_heads, rank, size) for rank in range(size)]
    assert [each for own, _, _ in parts for each in own] == list(range(heads))
    group = heads // kv_heads
    for own, kept, _ in parts:
        assert len(own) % len(kept) == 0
        assert {each // group for each in own} == set(kept)
    firsts = [each for _, kept, first in parts if first for each in kept]
    assert firsts == list(range(kv_heads)), "each head of keys has one first rank"


def test_parts_of_weights_in_groups_lose_nothing() -> None:
    weight = rounded(torch.randn(12, 256), 4, group=128)
    for cut in (Cut(1, (range(64, 160),)), Cut(1, (range(32), range(128, 256)))):
        torch.testing.assert_close(cut.of_grouped(weight).numbers(), cut.of(weight.numbers()))
        assert cut.of_grouped(weight).shape == (12, cut.length)
    own = rows([range(1, 3), range(2)], [4, 8])
    torch.testing.assert_close(own.of_grouped(weight).numbers(), weight.numbers()[[1, 2, 4, 5]])
