"""Which kernels compute what: fa2, fa3 or ours, by what is asked for, built, and faster."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_flashinfer import share_all

from coppice.kernels.attention.interface import AttentionCase
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.backends import select_backend
from coppice.kernels.flashinfer import backend as backend_module
from coppice.kernels.flashinfer import wrappers as wrappers_module
from coppice.kernels.flashinfer.backend import FlashInferBackend
from coppice.kernels.flashinfer.choice import (
    most_split,
    prefers_fa3,
    waits_for_the_longest,
    without_fa3,
)
from coppice.kernels.flashinfer.fixed import FlashInferFixedPlan
from coppice.kernels.flashinfer.levels import Level
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.tiles import choose_tiles
from coppice.kernels.triton import base
from coppice.kernels.triton.plans import TritonFixedPlan
from coppice.runtime.config import FLASHINFER_KERNELS, EngineConfig

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="looks into what stands for FlashInfer without a GPU"
)
CPU = torch.device("cpu")
CASE = AttentionCase(
    num_heads=8, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16, scale=0.125,
)  # fmt: skip
LLAMA = CostModel(choose_tiles(128, 2, 4), group=4, kv_heads=8, head_dim=128, key_bytes=512)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(base, "capability_of", lambda device: (9, 0))


def level(rows, keys, *, causal=True) -> Level:
    """Groups of these rows over these keys, in pages of one token."""
    ends = np.cumsum([0, *rows]).astype(np.int32)
    kv_len = np.array(keys, np.int32)
    pages = np.cumsum([0, *keys]).astype(np.int32)
    return Level(0, ends, pages, pages[:-1], kv_len, kv_len.clip(max=1), kv_len, causal)


@pytest.mark.parametrize(
    ("rows", "keys", "causal", "fa3"),
    [
        ([2048], [2048], True, True),
        ([8192], [40_000], True, True),
        ([512] * 8, [3000] * 8, True, True),
        ([192], [192], True, False),
        # A tile of fa3 is of one head: few rows leave it empty, and few tiles the chip.
        ([16] * 40, [3000] * 40, True, False),
        ([64], [100_000], True, False),
        # Rows that decode below a shared stretch: fa2 packs their heads, and splits the keys.
        ([64], [8192], False, False),
        ([256], [8192], False, False),
        ([32] * 8, [8192] * 8, False, False),
        # Wide levels of chunks.
        ([4096], [8192], False, True),
        ([4096, 100], [8192, 0], False, True),
        ([100], [0], False, False),
    ],
)
def test_fa3_takes_levels_of_many_rows(rows, keys, causal, fa3):
    assert prefers_fa3(level(rows, keys, causal=causal), LLAMA) == fa3


def test_where_fa3_is():
    sixteen, eight = torch.bfloat16, torch.float8_e4m3fn
    assert without_fa3((9, 0), 128, sixteen, sixteen) is None
    for given, reason in (
        (((8, 9), 128, sixteen, sixteen), "compute capability 9.0, and this is 8.9"),
        (((10, 0), 128, sixteen, sixteen), "and this is 10.0"),
        (((9, 0), 128, sixteen, eight), "reads no cache of torch.float8_e4m3fn"),
        (((9, 0), 512, sixteen, sixteen), "no heads of 512"),
    ):
        assert reason in without_fa3(*given)


def test_batches_in_which_fa2_would_wait_for_the_longest():
    def skewed(lengths, model=LLAMA):
        return waits_for_the_longest(level([1] * len(lengths), lengths, causal=False), model)

    assert skewed([100_000] + [1000] * 63)
    assert skewed([30_000] * 4 + [500] * 252)
    assert not skewed([100_000] + [1000] * 31), "so few are split"
    assert not skewed([8000] * 64)
    assert not skewed([8000] * 256)
    assert not skewed([1000 + 10 * each for each in range(128)])
    # The decode wrapper's kernel has more programs on a multiprocessor.
    few_heads = replace(LLAMA, group=2, tiles=choose_tiles(128, 2, 2))
    assert skewed([100_000] + [1000] * 99, few_heads)
    assert not skewed([100_000] + [1000] * 63, few_heads)
    eight_bits = replace(few_heads, key_bytes=256)
    assert skewed([100_000] + [1000] * 63, eight_bits)
    assert most_split(8, 132) == 32


def chunk(make_batch, rows=192):
    return make_batch(
        [(rows, 0), (1, 20)], page_size=16, kv_heads=2, group=4, dtype=torch.bfloat16, head_dim=64
    )


def kernels_of(library, backend, batch) -> set[tuple[str, bool]]:
    """The kernels of each level of a step, and whether it is causal."""
    before = {id(plan) for plan in library.plans}
    found = batch.run(backend)
    for got, expected in zip(found, batch.run(ReferenceBackend()), strict=True):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    return {
        (wrapper.kernels, plan.causal)
        for wrapper in library.wrappers
        for plan in wrapper.plans
        if id(plan) not in before
    }


@pytest.mark.slow
def test_a_wheel_with_fa3_is_used_on_hopper(library, hopper, make_batch, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="coppice.kernels")
    backend = FlashInferBackend(CPU, CASE)
    assert "fa3 computes the rows of prompts where it takes less time" in caplog.text
    monkeypatch.setattr(backend, "_multiprocessors", 2)
    assert kernels_of(library, backend, chunk(make_batch)) == {("fa3", True), ("fa2", False)}
    assert kernels_of(library, backend, chunk(make_batch, 3)) == {("fa2", True), ("fa2", False)}


def test_a_wheel_without_fa3_falls_back_by_name(library, hopper, make_batch, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="coppice.kernels")
    building = []

    def compiled(case):
        building.append((case.kernels, os.environ.get("FLASHINFER_DISABLE_JIT")))
        return case.kernels == "fa2"

    library.compiled = compiled
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    backend = FlashInferBackend(CPU, CASE)
    assert "fa2 computes everything, not its fa3: MissingJITCacheError" in caplog.text
    assert set(building) == {("fa2", None), ("fa3", "1")}, "fa3 alone is not built unasked"
    assert "FLASHINFER_DISABLE_JIT" not in os.environ
    monkeypatch.setattr(backend, "_multiprocessors", 2)
    assert kernels_of(library, backend, chunk(make_batch)) == {("fa2", True), ("fa2", False)}
    with pytest.raises(
        ValueError, match=r"flashinfer_kernels is 'fa3', which does not cover .*JIT"
    ):
        FlashInferBackend(CPU, CASE, kernels="fa3")
    assert building[-1] == ("fa3", None), "who asks for it waits for it"


def test_wrong_results_of_fa3_are_noticed(library, hopper, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="coppice.kernels")
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper
    run = wrapper.run

    def wrong(self, *given, lse, **options):
        out, lse = run(self, *given, lse=lse, **options)
        return out, lse.mul_(2) if self.kernels == "fa3" else lse

    monkeypatch.setattr(wrapper, "run", wrong)
    assert not FlashInferBackend(CPU, CASE)._with_fa3
    assert "not its fa3: ArithmeticError: its results are wrong" in caplog.text


@pytest.mark.slow
def test_what_is_asked_for_is_used(library, hopper, make_batch):
    backend = FlashInferBackend(CPU, CASE, kernels="fa3")
    assert kernels_of(library, backend, chunk(make_batch, 3)) == {("fa3", True), ("fa2", False)}
    backend = FlashInferBackend(CPU, CASE, kernels="fa2")
    backend._multiprocessors = 2
    assert kernels_of(library, backend, chunk(make_batch)) == {("fa2", True), ("fa2", False)}


def test_what_is_not_there_is_refused_by_name(library, hopper, monkeypatch):
    with pytest.raises(
        ValueError, match="flashinfer_kernels is 'fa4'; it must be 'auto', 'fa2' or"
    ):
        FlashInferBackend(CPU, CASE, kernels="fa4")
    eight = replace(CASE, cache_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"is 'fa3', which .*it reads no cache of torch.float8"):
        FlashInferBackend(CPU, eight, kernels="fa3")
    monkeypatch.setattr(base, "capability_of", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"is 'fa3', which .*capability 9.0, and this is 8.0"):
        FlashInferBackend(CPU, CASE, kernels="fa3")
    for name in ("triton", "reference", "auto"):
        with pytest.raises(ValueError, match=r"flashinfer_kernels is 'fa3'; attention_backend '"):
            select_backend(name, CPU, flashinfer_kernels="fa3")
    with pytest.raises(ValueError, match="flashinfer_kernels must be"):
        EngineConfig(model="m", flashinfer_kernels="fa4")
    assert backend_module.CHOICES == FLASHINFER_KERNELS


def test_a_device_that_is_lost_is_no_reason_for_triton(library, monkeypatch):
    """After an illegal address, say: Triton would fail on it, too."""
    library.compiled = lambda case: False
    lost = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
    monkeypatch.setattr(FlashInferBackend, "_on_cuda", True)

    def synchronize(device):
        raise lost

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match=r"cpu failed when .*JIT.*does not compute any more"):
        FlashInferBackend(CPU, CASE)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(ValueError, match="does not cover"):
        FlashInferBackend(CPU, CASE)


def test_all_variants_of_the_merge_are_launched_at_the_start(library, monkeypatch):
    """With rows in their places and in others, over a cache with scales and without."""
    launched, merge = set(), wrappers_module.merge_parts

    def counted(parts, parts_lse, bounds, places, v_scales, group):
        launched.add((places is not None, v_scales is not None))
        return merge(parts, parts_lse, bounds, places, v_scales, group)

    monkeypatch.setattr(wrappers_module, "merge_parts", counted)
    FlashInferBackend(CPU, replace(CASE, cache_dtype=torch.float8_e4m3fn))
    assert launched == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.slow
def test_graphs_of_skewed_batches_are_ours(library, make_batch, monkeypatch):
    """From the sizes on that FlashInfer does not split; other steps of that size stay with it."""
    monkeypatch.setattr(base, "H100_MULTIPROCESSORS", 2)
    share_all(monkeypatch)  # so small a batch pays for no merge
    backend = FlashInferBackend(CPU, CASE)
    made = backend.fixed_plans((1, 4), page_size=16, num_pages=300, max_pages=256)
    assert [type(each) for each in made[0]] == [FlashInferFixedPlan, TritonFixedPlan]
    assert [type(each) for each in made[1]] == [FlashInferFixedPlan] * 2 + [TritonFixedPlan]
    options = {"page_size": 16, "kv_heads": 2, "group": 4, "dtype": torch.bfloat16, "head_dim": 64}
    even = make_batch([(1, 30)] * 4, **options)
    for plan in made[1]:  # as they are captured
        assert plan.load(even.plan)
        even.run(backend, prepared=plan)
    skewed = make_batch([(1, 4000), (1, 3), (1, 9), (1, 1)], **options)
    assert [plan.load(skewed.plan) for plan in made[1]] == [False, False, True]
    for got, expected in zip(
        skewed.run(backend, prepared=made[1][2]), skewed.run(ReferenceBackend()), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    assert made[1][0].load(even.plan)
