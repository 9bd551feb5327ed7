"""The fused row kernels against torch's operators, one row and many, and packed products."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from coppice.kernels.attention.interface import rotate
from coppice.kernels.cpu.code.hadamard import transformed
from coppice.kernels.cpu.layer.matmul import float_products
from coppice.kernels.cpu.layer.rows import RowKernels, row_kernels
from coppice.runtime.model.layers import Linear

ROWS = (0, 1, 3, 700)  # 700 are shared among threads
ONE_ROW_OR_MANY = pytest.mark.parametrize("rows", ROWS)


@pytest.fixture(params=["compiled", "torch"])
def kernels(request) -> RowKernels:
    if request.param == "torch":
        return RowKernels(None)
    assert row_kernels()._fused is not None, "numba works on every machine that runs the tests"
    return row_kernels()


@ONE_ROW_OR_MANY
@pytest.mark.parametrize("width", [64, 70])
def test_add_norm(kernels, rows, width):
    x, added, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    expected = F.rms_norm(x + added, (width,), weight, 1e-5)
    without = F.rms_norm(x, (width,), weight, 1e-5)
    torch.testing.assert_close(kernels.add_norm(x, None, weight, 1e-5), without)
    summed = x + added
    torch.testing.assert_close(kernels.add_norm(x, added, weight, 1e-5), expected)
    torch.testing.assert_close(x, summed)


def test_norm_with_a_weight_for_each_head(kernels):
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    expected = F.rms_norm(x, (16,), eps=1e-6) * weight
    torch.testing.assert_close(kernels.add_norm(x[:, :], None, weight, 1e-6), expected)


@ONE_ROW_OR_MANY
@pytest.mark.parametrize("width", [64, 100])
def test_silu_mul(kernels, rows, width):
    both = torch.randn(rows, 2 * width) * 20
    both.view(-1)[: 2 * width : 7] = 300.0  # where exp overflows
    both.view(-1)[1 : 2 * width : 7] = -300.0
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(kernels.silu_mul(both), F.silu(gate) * up, rtol=1e-5, atol=1e-5)


def test_silu_mul_of_nan_is_nan(kernels):
    both = torch.ones(2, 128)
    both[1, 5] = torch.nan
    assert kernels.silu_mul(both).isnan().sum() == 1


@ONE_ROW_OR_MANY
def test_rotate_write(kernels, rows):
    heads = torch.randn(rows, 7, 16)
    cos, sin = torch.randn(rows, 1, 16), torch.randn(rows, 1, 16)
    k_cache, v_cache = torch.zeros(100, 8, 2, 16), torch.zeros(100, 8, 2, 16)
    slots = torch.randperm(800)[:rows]
    qk, v = heads[:, :5], heads[:, 5:]
    out = kernels.rotate_write(qk, v, cos, sin, k_cache, v_cache, slots)
    expected = rotate(qk, cos, sin)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(k_cache.flatten(0, 1)[slots], expected[:, 3:])
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    untouched = torch.ones(800, dtype=torch.bool)
    untouched[slots] = False
    assert not k_cache.flatten(0, 1)[untouched].any()
    again = kernels.rotate_write(qk.contiguous(), v.contiguous(), cos, sin, k_cache, v_cache, slots)
    assert torch.equal(out, again)  # for any distance of rows


@pytest.mark.parametrize("slot", [-1, 8])
def test_a_slot_that_is_not_there_is_refused(slot):
    cache = torch.zeros(2, 4, 1, 16)
    qk, v, angle = torch.randn(1, 2, 16), torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    with pytest.raises(IndexError, match=r"slots must be from 0 to 7"):
        row_kernels().rotate_write(qk, v, angle, angle, cache, cache.clone(), torch.tensor([slot]))


@ONE_ROW_OR_MANY
@pytest.mark.parametrize("biased", [False, True])
def test_an_int8_product_by_rows(kernels, rows, biased):
    x = torch.randn(rows, 48) * torch.logspace(-3, 3, rows)[:, None]
    x[:1] = 0.0  # a row of zeros has no scale
    levels, peaks = kernels.quantize(x)
    x = transformed(x)
    assert levels.dtype == torch.int8
    assert torch.equal(peaks, x.abs().amax(dim=-1).clamp(min=1e-30))
    assert ((levels * peaks[:, None] / 127 - x).abs() <= 0.5001 * peaks[:, None] / 127).all()
    product = torch.randint(-(2**20), 2**20, (rows, 70), dtype=torch.int32)
    scale, bias = torch.rand(70), torch.randn(70) if biased else None
    expected = product.double() * scale * peaks[:, None] + (0 if bias is None else bias)
    got = kernels.rescale(product, peaks, scale, bias)
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)


def test_an_int8_product_of_a_row_with_nan_is_nan(kernels):
    x = torch.ones(2, 32)
    x[1, 3] = torch.nan
    levels, peaks = kernels.quantize(x)
    out = kernels.rescale(levels.int(), peaks, torch.ones(32), None)
    assert out[1].isnan().all()
    assert not out[0].isnan().any()


def test_rows_do_not_depend_on_those_beside_them():
    """Alone, among few, or in a thread's share of many: the same bits."""
    x, weight = torch.randn(700, 96), torch.randn(96)
    kernels = row_kernels()
    many = kernels.add_norm(x, None, weight, 1e-5), kernels.silu_mul(x), kernels.quantize(x)[0]
    for row in (0, 349, 350, 699):
        own = x[row : row + 1].clone()
        one = kernels.add_norm(own, None, weight, 1e-5), kernels.silu_mul(own)
        for got, expected in zip((*one, kernels.quantize(own)[0]), many, strict=True):
            assert torch.equal(got[0], expected[row])


def test_pages_are_copied_in_order(kernels):
    """What has been written may be read by the next copy; odd sizes, too."""
    blocks = [torch.arange(5 * 7, dtype=torch.uint8).view(5, 7) + 100 * i for i in range(2)]
    expected = [each.clone() for each in blocks]
    for each in expected:
        each[3], each[1] = each[0].clone(), each[0].clone()
    kernels.copy_pages([each.data_ptr() for each in blocks], 7, [0, 3], [3, 1])
    for got, wanted in zip(blocks, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_product_is_the_product(biased):
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    linear = Linear(72, 150, bias=biased, **place)
    weight = torch.randn(150, 72)
    linear.fill_weight(0, weight)
    if biased:
        linear.fill_bias(0, torch.randn(150))
    linear.pack()
    for rows in (1, 2, 5, 64, 300):
        x = torch.randn(rows, 72)
        expected = F.linear(
            x.double(), weight.double(), None if not biased else linear.bias.double()
        )
        torch.testing.assert_close(linear(x), expected.float(), rtol=1e-4, atol=1e-4)
    if float_products.float_kernels() is not None:
        assert not hasattr(linear, "weight"), "the memory of the weight is given up"


def test_a_weight_that_is_not_multiplied_in_float32_is_left_as_it_is():
    linear = Linear(8, 4, bias=False, dtype=torch.bfloat16, device=torch.device("cpu"))
    linear.fill_weight(0, torch.ones(4, 8))
    linear.pack()
    assert torch.equal(
        linear(torch.ones(1, 8, dtype=torch.bfloat16)), torch.full((1, 4), 8.0).bfloat16()
    )


@pytest.mark.parametrize("module", ["cpu.attention.numba_items", "cpu.layer.rows_numba"])
def test_threads_run_before_compiled_code_is_loaded(module):
    """Cached code that calls parallel code crashes otherwise, if two processes had compiled it.

    Their start does not change the number of torch's threads.
    """
    program = (
        "import torch\n"
        "torch.set_num_threads(3)\n"
        f"import coppice.kernels.{module}\n"
        "from numba.np.ufunc import parallel\n"
        "assert parallel._is_initialized\n"
        "assert torch.get_num_threads() == 3, torch.get_num_threads()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
