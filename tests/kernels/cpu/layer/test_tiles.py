"""Products by the processor's tiles (AMX): the bits of each way are those of the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from coppice.kernels.cpu.code.processor import path_of
from coppice.kernels.cpu.layer.matmul import float_products, int8_products

float_panels = float_products.float_kernels()
int8_panels = int8_products.panel_kernels()
bfloat16_tiles = pytest.mark.skipif(
    float_panels is None or not float_panels.HAS_TILES, reason="this processor has no AMX"
)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@bfloat16_tiles
@pytest.mark.parametrize("shape", [(48, 64), (150, 34), (97, 640), (70, 1400)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_has_the_same_bits_among_any_others(shape: tuple[int, int], biased: bool) -> None:
    """Blocks of 16 and 32 rows, the last one computed twice, and rows divided among threads.

    Many inputs are multiplied part by part where there are many rows.
    """
    weight = float_products.pack(drawn(*shape).bfloat16(), pairs=True)
    bias = drawn(shape[0]) if biased else None
    x = drawn(700, shape[1])
    alone = torch.cat([float_products.multiply(row[None], weight, bias) for row in x])
    exact = x.bfloat16().double() @ drawn(*shape).bfloat16().double().t()
    if bias is not None:
        exact += bias
    torch.testing.assert_close(alone, exact.float(), rtol=1e-5, atol=1e-4)
    for rows in (2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 255, 257, 700):
        assert torch.equal(float_products.multiply(x[:rows], weight, bias), alone[:rows])


@bfloat16_tiles
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 192), (96, 416), (34, 1536)])
def test_a_feed_forward_part_has_the_bits_of_its_products(
    hidden: int, inner: int, gelu: bool, threads: int
) -> None:
    """Blocks of columns that begin within panels, and rows that are worked in several parts."""
    from coppice.kernels.cpu.layer import rows_numba
    from coppice.kernels.cpu.layer.matmul.tiles.gate import feed_forward

    gate_up = float_products.pack(drawn(2 * inner, hidden).bfloat16(), pairs=True)
    down = float_products.pack(drawn(hidden, inner).bfloat16(), pairs=True)
    bias = drawn(hidden)
    x = drawn(1100, hidden)
    both = float_products.multiply(x, gate_up, None)
    active = np.empty((len(x), inner), np.float32)
    rows_numba.gate_mul(gelu, both.numpy(), active, threads)
    expected = float_products.multiply(torch.from_numpy(active), down, bias)
    for rows in (256, 1100):
        found = np.empty((rows, hidden), np.float32)
        panels = float_panels.product(gate_up.kind)
        feed_forward(
            panels, x[:rows].numpy(), gate_up.address, gelu, inner, down.address, bias.data_ptr(),
            found, threads,
        )  # fmt: skip
        assert np.array_equal(found, expected[:rows].numpy())


@pytest.mark.skipif(
    int8_panels is None or path_of("int8") != "amx", reason="this processor has no AMX"
)
@pytest.mark.parametrize("shape", [(48, 64), (150, 128), (97, 640), (50, 60)])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_products_are_exact(shape: tuple[int, int], biased: bool) -> None:
    levels = torch.randint(-127, 128, shape, dtype=torch.int8)
    weight, scale = int8_products.pack(levels), drawn(shape[0]).abs()
    bias = drawn(shape[0]) if biased else None
    x = drawn(300, shape[1])
    alone = torch.cat([int8_products.multiply(row[None], weight, scale, bias) for row in x])
    plain = int8_products.multiply_plain(x, levels, scale, bias)
    torch.testing.assert_close(alone, plain, rtol=1e-5, atol=1e-2)
    for rows in (2, 3, 4, 5, 15, 16, 17, 33, 300):
        assert torch.equal(int8_products.multiply(x[:rows], weight, scale, bias), alone[:rows])
