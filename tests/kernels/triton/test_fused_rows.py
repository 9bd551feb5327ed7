"""Kernels that do the work of two give the bits that the two give."""

from __future__ import annotations

import pytest
import torch

from coppice.kernels.attention.interface import HeadNorm, LayerCache
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.triton import base
from coppice.kernels.triton.rows import (
    quantize_e4m3,
    rms_norm,
    rms_norm_e4m3,
    silu_mul,
    silu_mul_e4m3,
)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norm_with_conversion(triton_backend, dtype):
    device = triton_backend.device
    x, added = torch.randn(2, 5, 80, device=device).to(dtype)
    weight = torch.randn(80, device=device).to(dtype)
    assert_same(rms_norm_e4m3(x, weight, 1e-5), quantize_e4m3(rms_norm(x, weight, 1e-5)))
    again = x.clone()
    expected = quantize_e4m3(rms_norm(again, weight, 1e-5, added))
    assert_same(rms_norm_e4m3(x, weight, 1e-5, added), expected)
    assert torch.equal(x, again)  # the residual is the sum
    assert [each.shape for each in rms_norm_e4m3(x[:0], weight, 1e-5)] == [(0, 80), (0, 1)]
    with pytest.raises(ValueError, match=r"x has shape \(5, 8, 10\); it must be \(T, width\)"):
        rms_norm_e4m3(x.view(5, 8, 10), weight, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_silu_with_conversion(triton_backend, dtype):
    both = (3 * torch.randn(4, 2 * 1100, device=triton_backend.device)).to(dtype)
    both[1] = 0
    assert_same(silu_mul_e4m3(both), quantize_e4m3(silu_mul(both)))
    assert [each.shape for each in silu_mul_e4m3(both[:0])] == [(0, 1100), (0, 1)]
    with pytest.raises(ValueError, match=r"gate_up has shape \(4, 7\)"):
        silu_mul_e4m3(both[:, :7])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "numbers"), [(4, 16, 2048), (5, 80, 512), (6, 16, 1)]
)
def test_norm_with_rotation(triton_backend, monkeypatch, heads, head_dim, numbers, scaled):
    """All heads in one program, queries and keys in one, and one head in each."""
    monkeypatch.setattr(base, "_HEAD_NUMBERS", numbers)
    device = triton_backend.device
    qk = torch.randn(3, heads + 2, head_dim, device=device)
    v = torch.randn(3, 4, head_dim, device=device)[:, 2:]
    cos, sin = torch.randn(2, 3, 1, head_dim, device=device)
    norm = HeadNorm(torch.randn(heads + 2, head_dim, device=device), 1e-3)
    slots = torch.tensor([3, 1, 9], device=device)
    dtype = torch.float8_e4m3fn if scaled else torch.float32
    scales = (torch.tensor([0.5, 1.0], device=device),) * 2 if scaled else None

    def written(backend, qk, norm):
        pages = [torch.zeros(3, 4, 2, head_dim, dtype=dtype, device=device) for _ in range(2)]
        cache = LayerCache(*pages, scales)
        if norm is None:
            made = backend.write_rotated(qk, v, cos, sin, cache, slots)
        else:
            made = backend.write_normed(qk, v, norm, cos, sin, cache, slots)
        return [*made, *(page.float() for page in pages)]

    ours = written(triton_backend, qk, norm)
    two = written(triton_backend, rms_norm(qk, norm.weight, norm.eps), None)
    plain = written(ReferenceBackend(), qk, norm)
    tolerance = 2.0**-3 if scaled else 1e-5
    for one, other, exact in zip(ours, two, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-3 if scaled else 1e-6, atol=1e-6)
        torch.testing.assert_close(one, exact, rtol=tolerance, atol=1e-2 if scaled else 1e-5)
    with pytest.raises(ValueError, match=r"norm.weight has shape \(16,\).*must be"):
        written(triton_backend, qk, HeadNorm(torch.ones(16, device=device), 1e-3))
