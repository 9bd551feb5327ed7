"""Products over a cache of 8-bit floats are those of float16: nothing of 16-bit queries is lost."""

from __future__ import annotations

import pytest
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.attention.reference import ReferenceBackend

REFERENCE = ReferenceBackend()


def attended(batch, backends, q, stored, scales, scale, **features):
    """The results of each backend, of a cache that has the batch's own rows already."""
    found = []
    for each in backends:
        place = getattr(each, "device", torch.device("cpu"))
        cache = LayerCache(
            *(one.to(place) for one in stored), tuple(one.to(place) for one in scales)
        )
        out, lse = each.attend(
            q.to(place), batch.k.to(place), batch.v.to(place), cache, each.prepare(batch.plan),
            scale=scale, **features,
        )  # fmt: skip
        found.append((out.float().cpu(), lse.cpu()))
    return found


def stored(batch, k, v):
    """Both as 8-bit floats where the batch's caches are numbers, and NaN elsewhere."""
    owned = batch.k_cache.float().isfinite()
    for slot in batch.slots.tolist():  # its own rows are not written yet
        owned.flatten(0, 1)[slot] = True
    return [torch.where(owned, each, torch.nan).to(torch.float8_e4m3fn) for each in (k, v)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 70])
def test_queries_of_any_size(make_batch, triton_backend, dtype, rows):
    """Rows beyond the range of float16 and far below it, and small numbers beside large ones."""
    batch = make_batch([(rows, 21), (1, 33)], dtype=dtype, head_dim=80, page_size=16)
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, *batch.k_cache.shape, generator=generator)
    most = 1e6 if dtype == torch.bfloat16 else 1e4
    sizes = torch.tensor([1.0, 1e-3, most])[torch.arange(len(batch.q)) % 3]
    spread = 10.0 ** -(4 * torch.rand(batch.q.shape, generator=generator))
    q = (batch.q.float() * spread * sizes[:, None, None]).to(dtype)
    scales = torch.tensor([0.01, 2.0]), torch.tensor([0.5, 1.5])
    for scale, features in ((0.3, {}), (3.0, {"logit_softcap": 5.0, "sliding_window": 30})):
        (out, lse), (expected, expected_lse) = attended(
            batch, (triton_backend, REFERENCE), q, stored(batch, k, v), scales, scale, **features
        )
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        # The products' sums are those of float32: no query was rounded.
        torch.testing.assert_close(lse, expected_lse, rtol=2e-5, atol=2e-5)


def test_small_weights(make_batch, triton_backend):
    """The sum of many keys' weights far below the first one's counts, as where their values do."""
    batch = make_batch([(1, 40)], group=1, kv_heads=1, dtype=torch.bfloat16, page_size=16)
    k, v = torch.zeros(2, *batch.k_cache.shape)
    first = batch.plan.page_indices[0]
    k[first, 0, 0, 0], v[:, :, 0, :] = 16.0, 300.0
    v[first, 0] = 0.0
    q = torch.zeros_like(batch.q)
    q[..., 0] = 1.0
    one = torch.ones(1), torch.ones(1)
    (out, _), (expected, _) = attended(
        batch, (triton_backend, REFERENCE), q, stored(batch, k, v), one, 0.96
    )
    assert 0 < expected.max() < 0.01  # 40 weights of 2 ** -22 times 300
    torch.testing.assert_close(out, expected, rtol=2.0**-7, atol=0)


def test_a_scale_below_0_is_refused(make_batch, triton_backend):
    batch = make_batch([(1, 4)])
    batch.scale = -1.0
    with pytest.raises(ValueError, match=r"scale is -1.0; it must be 0 or more"):
        batch.run(triton_backend)
    batch.scale = 0.0
    for got, expected in zip(batch.run(triton_backend), batch.run(REFERENCE), strict=True):
        torch.testing.assert_close(got, expected)
