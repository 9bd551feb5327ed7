"""Packed pages in 8 bits: how far they are from what they were, and what stays exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.pages.packing import pack, packed_bytes
from coppice.kernels.rounding import Rounding

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def caches_of(dtype: torch.dtype, dims=(64, 96), pages: int = 3) -> list[LayerCache]:
    return [LayerCache(*torch.randn(2, pages, 4, 2, dim).to(dtype)) for dim in dims]


def packed(caches: list[LayerCache]) -> np.ndarray:
    count = caches[0].k.shape[0]
    out = torch.empty(count, packed_bytes(caches), dtype=torch.uint8)
    pack(caches, range(count), out)
    return out.numpy()


def restored(rounding: Rounding, pages: np.ndarray) -> np.ndarray:
    rounded = rounding.encode(pages)
    assert rounded.shape == (len(pages), rounding.page_bytes)
    out = np.full_like(pages, 255)
    rounding.decode(rounded, out)
    return out


def numbers(pages: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(pages).view(dtype).float()


@pytest.mark.parametrize("dtype", TYPES)
def test_int8_errs_by_half_a_step_of_each_block(dtype):
    caches = caches_of(dtype)
    pages = packed(caches)
    rounding = Rounding(caches, "int8")
    assert rounding.page_bytes == pages.shape[1] // dtype.itemsize * 34 // 32
    exact = numbers(pages, dtype).view(-1, 32)
    error = (numbers(restored(rounding, pages), dtype).view(-1, 32) - exact).abs()
    step = exact.abs().amax(1, keepdim=True) / 127 * (1 + 2**-7)
    own = exact.abs() * torch.finfo(dtype).eps  # what the type itself rounds
    assert (error <= step / 2 + own + 1e-12).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1.0, 1e-4, 3e3])
def test_fp8_is_what_torch_rounds_to_and_rounds_once(dtype, size):
    caches = caches_of(dtype)
    for cache in caches:
        cache.k.mul_(size)
    pages = packed(caches)
    rounding = Rounding(caches, "fp8")
    exact = numbers(pages, dtype).view(-1, 32)
    scale = torch.exp2(torch.ceil(torch.log2(exact.abs().amax(1, keepdim=True) / 448)))
    expected = (exact / scale).to(torch.float8_e4m3fn).float() * scale
    found = restored(rounding, pages)
    assert torch.equal(numbers(found, dtype).view(-1, 32), expected.to(dtype).float())
    assert (restored(rounding, found) == found).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_special_numbers_stay_what_they_are(kind):
    caches = [LayerCache(*torch.zeros(2, 1, 1, 8, 32))]
    k = caches[0].k[0, 0]
    k[1, 3], k[1, 4] = 1.0, -0.5
    k[2, 0], k[3, 0] = torch.inf, torch.nan
    k[4, 0], k[4, 1] = 3e38, -3e38
    k[5, 0], k[5, 1] = 1e-20, 1e-42
    k[6] = 448.0
    pages = packed(caches)
    found = numbers(restored(Rounding(caches, kind), pages), torch.float32).view(2, 8, 32)[0]
    assert torch.equal(found[0], k[0]) and torch.equal(found[7], k[7])
    assert found[1, 3] == pytest.approx(1, rel=0.01) and found[1, 4] == pytest.approx(
        -0.5, rel=0.02
    )
    assert torch.count_nonzero(found[1]) == 2
    assert not found[2:4].isfinite().any(), "what the step did wrong is not hidden"
    assert found[4, :2] == pytest.approx([3e38, -3e38], rel=0.07) and not found[4, 2:].any()
    assert found[5, 0] == pytest.approx(1e-20, rel=0.07) and not found[5, 1:].any()
    assert found[6] == pytest.approx(torch.full((32,), 448.0), rel=0.01)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_token_does_not_depend_on_the_rest_of_its_page(kind):
    """The last page of a prompt is partly filled, and may hold anything after its tokens."""
    caches = caches_of(torch.float32)
    pages = packed(caches)
    rounding = Rounding(caches, kind)
    before = restored(rounding, pages)
    rest = packed([LayerCache(*(each.clone() for each in (c.k, c.v))) for c in caches])
    assert (rest == pages).all()
    for cache in caches:
        for each in (cache.k, cache.v):
            each[:, 2:] = torch.nan
    after = numbers(restored(rounding, packed(caches)), torch.float32)
    same = numbers(before, torch.float32)
    at = 0
    for cache in caches:
        for each in (cache.k, cache.v):
            part, width = each[0, :2].numel(), each[0].numel()
            assert torch.equal(after[:, at : at + part], same[:, at : at + part])
            assert after[:, at + part : at + width].isnan().all()
            at += width


def test_heads_of_any_width_have_whole_blocks():
    for dim, block in ((80, 20), (5, 5), (24, 24), (256, 32)):
        caches = caches_of(torch.float32, dims=(dim,))
        rounding = Rounding(caches, "int8")
        pages = packed(caches)
        assert rounding.page_bytes == pages.shape[1] // 4 * (block + 2) // block
        error = numbers(restored(rounding, pages), torch.float32) - numbers(pages, torch.float32)
        assert error.abs().max() < 0.03


def test_other_types_are_refused():
    caches = [LayerCache(*torch.zeros(2, 1, 1, 1, 8, dtype=torch.float8_e4m3fn))]
    with pytest.raises(ValueError, match="16 or 32 bits a number, got float8_e4m3fn"):
        Rounding(caches, "int8")
