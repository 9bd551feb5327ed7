"""Pages in bfloat16 beside float32 queries, on a CPU: equal to the reference on the same pages."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.kernels.attention.interface import AttentionPlan, LayerCache
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.cpu.attention import torch_items
from coppice.kernels.cpu.backend import CpuBackend
from coppice.kernels.cpu.code.pairs import HAS_PAIRS


@pytest.fixture(scope="module", params=["compiled", "torch"])
def backend(request):
    backend = CpuBackend()
    if request.param == "torch":
        backend._kernels = torch_items
    return backend


def attended(batch, backend, window=None, softcap=None):
    """The result over pages in bfloat16, and these pages."""
    pages = LayerCache(batch.k_cache.bfloat16(), batch.v_cache.bfloat16())
    backend.write_kv(batch.k, batch.v, pages, batch.slots)
    out, lse = backend.attend(
        batch.q, batch.k, batch.v, pages, backend.prepare(batch.plan, num_pages=batch.num_pages),
        scale=batch.scale, sliding_window=window, logit_softcap=softcap,
    )  # fmt: skip
    return out, lse, pages


def in_pairs(batch, pages, window, softcap):
    """What products of pairs give: queries, in base 2, and weights are rounded to bfloat16."""
    plan, group = batch.plan, batch.q.shape[1] // batch.k.shape[1]
    out, lse = torch.empty_like(batch.q), torch.empty(batch.q.shape[:2])
    factor = batch.scale * math.log2(math.e)
    for i, table in enumerate(batch.tables):
        length = int(plan.context_len[i])
        slots = [
            table[t // plan.page_size] * plan.page_size + t % plan.page_size for t in range(length)
        ]
        k, v = (
            each.float().flatten(0, 1)[slots].repeat_interleave(group, 1).double()
            for each in (pages.k, pages.v)
        )
        first, last = int(plan.query_start[i]), int(plan.query_start[i + 1])
        q = (batch.q[first:last] * factor).bfloat16().double()
        scores = torch.einsum("rhd,khd->rhk", q, k)
        if softcap is not None:
            bound = softcap * math.log2(math.e)
            scores = bound * (scores / bound).tanh()
        positions = torch.arange(length - (last - first), length)[:, None, None]
        keys = torch.arange(length)
        seen = (keys <= positions) & (keys > positions - (window or length))
        scores = torch.where(seen, scores, -torch.inf)
        top = scores.amax(2, keepdim=True).ceil()
        weights = torch.exp2(scores - top)
        total = weights.sum(2)
        rounded = weights.float().bfloat16().double()
        out[first:last] = torch.einsum("rhk,khd->rhd", rounded, v) / total[..., None]
        lse[first:last] = top[..., 0] * math.log(2) + total.log()
    return out, lse


TAILS = [(1, 40), (1, 3), (5, 9), (1, 0), (23, 60), (90, 1)]


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize(
    ("group", "head_dim", "window", "softcap"),
    [(1, 64, None, None), (4, 32, 9, None), (3, 18, None, 2.0), (2, 48, 30, 5.0)],
)
def test_pages_in_bfloat16_are_read_as_the_reference_reads_them(
    backend, make_batch, page_size, group, head_dim, window, softcap
):
    torch.manual_seed(page_size)
    batch = make_batch(TAILS, page_size=page_size, group=group, head_dim=head_dim)
    out, lse, pages = attended(batch, backend, window, softcap)
    expected, expected_lse, same = attended(batch, ReferenceBackend(), window, softcap)
    for mine, theirs in ((pages.k, same.k), (pages.v, same.v)):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    assert out.dtype == torch.float32
    exact, _ = batch.run(ReferenceBackend(), window, softcap)
    assert 1e-4 < (out - exact).abs().max() < 3e-2
    if HAS_PAIRS and backend._kernels is not torch_items:
        # A weight near the middle of two numbers in bfloat16 may become the other one.
        expected, expected_lse = in_pairs(batch, same, window, softcap)
        assert ((out - expected).abs() < 2e-5).float().mean() > 0.99
        torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)
    else:  # the pages are rounded, not the queries or the weights
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("head_dim", [64, 18])
def test_a_row_alone_has_the_sums_that_it_has_among_others(backend, make_batch, head_dim):
    """The rounding of a weight depends on no other row, and not on where its keys are divided."""
    batch = make_batch([(40, 1160), (9, 30)], page_size=16, group=3, head_dim=head_dim)
    together, lse, pages = attended(batch, backend)
    for i, row in ((0, 39), (0, 3), (1, 48)):
        length = int(batch.plan.context_len[i]) - (int(batch.plan.query_start[i + 1]) - 1 - row)
        table = batch.tables[i][: -(-length // 16)]
        plan = AttentionPlan(
            page_size=16,
            query_start=np.array([0, 1], np.int32),
            context_len=np.array([length], np.int32),
            page_indptr=np.array([0, len(table)], np.int32),
            page_indices=np.array(table, np.int32),
        )
        prepared = backend.prepare(plan, num_pages=batch.num_pages)
        q, k, v = (each[row : row + 1] for each in (batch.q, batch.k, batch.v))
        alone, alone_lse = backend.attend(
            q, k, v, pages, prepared, scale=batch.scale, sliding_window=None, logit_softcap=None
        )
        # A score is added up in another order, so one weight in thousands is the other neighbour.
        difference = (alone[0] - together[row]).abs()
        assert difference.max() < 1e-4
        assert difference.mean() < 1e-5
        torch.testing.assert_close(alone_lse[0], lse[row], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PAIRS, reason="this processor multiplies no pairs anyway")
def test_without_pairs_only_pages_are_rounded():
    """The same tests on the path of a processor without products of pairs."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow",
         str(Path(__file__))],
        env={**os.environ, "COPPICE_CPU_PATHS": "bfloat16=torch"},
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_numbers_are_rounded_to_nearest_even_as_torch_does():
    backend = CpuBackend()
    numbers = torch.randint(-(2**31), 2**31 - 1, (512, 1, 16), dtype=torch.int32)
    numbers[:2, 0] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000] * 4)
    v = numbers.view(torch.float32)
    pages = LayerCache(*(torch.zeros(64, 8, 1, 16, dtype=torch.bfloat16) for _ in range(2)))
    ones, zeros = torch.ones(512, 1, 16), torch.zeros(512, 1, 16)
    backend.write_rotated(torch.cat([v, v], 1), v, ones, zeros, pages, torch.arange(512))
    nan = v.isnan()
    found = pages.v.flatten(0, 1)
    assert found[nan].isnan().all()
    assert torch.equal(found[~nan], v.bfloat16()[~nan])


def test_types_that_do_not_fit_are_named(make_batch):
    batch = make_batch([(1, 3)])
    pages = LayerCache(batch.k_cache.half(), batch.v_cache.half())
    for backend, wrong in ((CpuBackend(), torch.float16), (CpuBackend(), torch.float64)):
        pages = LayerCache(batch.k_cache.to(wrong), batch.v_cache.to(wrong))
        with pytest.raises(ValueError, match=rf"cache.k is {wrong}.*float32, torch.bfloat16"):
            backend.write_kv(batch.k, batch.v, pages, batch.slots)
    pages = LayerCache(batch.k_cache.bfloat16(), batch.v_cache.bfloat16())
    with pytest.raises(ValueError, match=r"k is torch.float16; it must be torch.float32 for"):
        CpuBackend().write_kv(batch.k.half(), batch.v.half(), pages, batch.slots)
