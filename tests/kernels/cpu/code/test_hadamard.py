"""Transformed rows: what they keep, that compiled code equals torch, what large numbers cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice.kernels.cpu.code.hadamard import block_of, transformed
from coppice.kernels.cpu.code.hadamard_numba import transform_row
from coppice.kernels.cpu.layer.rows import RowKernels, row_kernels
from coppice.runtime.model.linear.eight_bit import Int8Linear

# Blocks of 16, 32, 64, and of 2, 4 and 8 times as many; then widths that are not transformed.
TURNED = (16, 48, 96, 64, 576, 384, 256, 1536, 2048)
LEFT = (4, 30, 72, 100)


@pytest.mark.parametrize("width", TURNED)
def test_turning_keeps_products_and_compiled_code_turns_bit_for_bit(width):
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(2, 5, width, generator=generator)
    block = block_of(width)
    assert block >= 16
    torch.testing.assert_close(transformed(transformed(x)) / block, x, rtol=1e-5, atol=1e-5)
    product = transformed(x) @ transformed(weight).T / block
    torch.testing.assert_close(product, x @ weight.T, rtol=1e-4, atol=1e-4)
    row, out = x[0].numpy(), np.zeros(width, np.float32)
    assert transform_row(row.ctypes.data, width, out.ctypes.data)
    assert np.array_equal(out, transformed(x[0]).numpy())


@pytest.mark.parametrize("width", LEFT)
def test_widths_without_a_block_stay(width):
    x, out = torch.randn(3, width), np.full(width, 7.0, np.float32)
    assert block_of(width) == 1
    assert transformed(x) is x
    assert not transform_row(x.data_ptr(), width, out.ctypes.data)
    assert (out == 7.0).all()


def test_compiled_levels_are_those_of_torch():
    x = torch.randn(9, 576, generator=torch.Generator().manual_seed(0))
    (ours, peaks), (levels, theirs) = row_kernels().quantize(x), RowKernels(None).quantize(x)
    assert torch.equal(peaks, theirs)
    assert (ours.int() - levels).abs().max() <= 1  # a tie may go either way


@pytest.mark.parametrize("packed", [False, True])
def test_a_few_large_channels_do_not_cost_the_others_their_levels(packed):
    """As in trained models: without transforming, the error of this product is 17 % of its norm."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(80, 576, generator=generator), torch.randn(40, 576, generator=generator)
    x[:, [7, 300]] *= 60
    weight[:, [7, 300]] /= 60
    linear = Int8Linear(576, 80, bias=False, dtype=torch.float32, device=torch.device("cpu"))
    linear.fill_weight(0, weight)
    if packed:
        linear.pack()
    exact = x @ weight.T
    assert (linear(x) - exact).norm() < 0.05 * exact.norm()
