"""What the FlashInfer backend has beyond the others: its plans, base 2, and what it refuses.

With a GPU and FlashInfer the kernels are its own; elsewhere ``fake_flashinfer`` stands for them.
"""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import replace

import fake_flashinfer
import pytest
import torch
from fake_flashinfer import Library
from trees import MIXED, TREES

from coppice.kernels.attention.interface import AttentionCase, LayerCache
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.backends import select_backend
from coppice.kernels.flashinfer import backend as backend_module
from coppice.kernels.flashinfer import wrappers as wrappers_module
from coppice.kernels.flashinfer.backend import FlashInferBackend
from coppice.kernels.flashinfer.wrappers import LayerKind
from coppice.kernels.triton import backend as triton_backend
from coppice.kernels.triton import base as gpu_backend

REFERENCE = ReferenceBackend()
CPU = torch.device("cpu")
CASE = AttentionCase(
    num_heads=8, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16, scale=0.125,
)  # fmt: skip

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="looks into what stands for FlashInfer without a GPU"
)


@pytest.fixture
def backend(flashinfer_backend) -> FlashInferBackend:
    return flashinfer_backend


@pytest.fixture
def share_all(monkeypatch):
    fake_flashinfer.share_all(monkeypatch)


def agree(got, expected) -> None:
    """Results are merged in the type of the queries, their log-sum-exps in float32.

    FlashInfer's kernels sum exponentials that are rounded to 16 bits.
    """
    tolerance = 2 * torch.finfo(expected[0].dtype).eps
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance)
    exact = 5e-3 if torch.cuda.is_available() else 2e-5
    torch.testing.assert_close(got[1], expected[1], rtol=exact, atol=exact)


@pytest.mark.parametrize("group", [2, 4], ids=["cuda cores", "tensor cores"])
@pytest.mark.parametrize("tree", TREES)
def test_merged_levels_equal_the_reference(make_batch, backend, size, share_all, tree, group):
    tails, stretches = TREES[tree]
    tails = [(rows, cached * size) for rows, cached in tails]
    batch = make_batch(tails, stretches, page_size=16, group=group)
    agree(batch.run(backend), batch.run(REFERENCE))


@needs_no_gpu
@pytest.mark.parametrize("tree", TREES)
def test_windows_and_soft_caps_equal_the_reference(make_batch, backend, share_all, tree):
    batch = make_batch(*TREES[tree], page_size=4)
    batch.scale = 1.0
    for window, softcap in ((7, None), (None, 5.0), (40, 5.0), (1, None)):
        agree(batch.run(backend, window, softcap), batch.run(REFERENCE, window, softcap))


@needs_no_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_8_bit_cache(make_batch, backend, share_all, dtype):
    """Every head has a scale of its own, which FlashInfer's plans cannot express."""
    batch = make_batch(MIXED, TREES["three levels"][1], dtype=dtype, page_size=4)
    scales = torch.tensor([0.01, 0.3]), torch.tensor([0.02, 0.1])
    shape = batch.k_cache.shape
    slots = torch.arange(shape[0] * shape[1])
    k, v = torch.randn(2, len(slots), *shape[2:], generator=torch.Generator().manual_seed(0))
    cache = LayerCache(*(torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2)), scales)
    REFERENCE.write_kv(k.to(dtype), v.to(dtype), cache, slots)
    results = [
        each.attend(batch.q, batch.k, batch.v, cache, each.prepare(batch.plan), scale=0.125)
        for each in (backend, REFERENCE)
    ]
    tolerance = 4 * torch.finfo(dtype).eps  # the scaled queries are rounded as well
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_log_sum_exps_are_base_2_in_flashinfer_and_natural_here(make_batch, backend):
    """Scores of zero: the sum of exponentials is the number of keys."""
    batch = make_batch([(1, 7), (3, 29)], page_size=16)
    batch.q = torch.zeros_like(batch.q)
    _, lse = batch.run(backend)
    expected = torch.tensor([8.0, 30, 31, 32]).log()[:, None].expand(lse.shape)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)

    # The same chunk through FlashInfer's wrapper itself.
    pages = torch.zeros_like(batch.k_cache).to(backend.device)
    table = torch.tensor(batch.tables[1], dtype=torch.int32, device=backend.device)
    length, rows = torch.tensor([32], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    wrapper = backend._library.BatchPrefillWithPagedKVCacheWrapper(
        backend._workspace, "NHD", backend="fa2"
    )
    wrapper.plan(
        rows, torch.tensor([0, 2], dtype=torch.int32), table, length // 2, 4, 2,
        batch.head_dim, 16, causal=True, q_data_type=batch.dtype, seq_lens=length,
    )  # fmt: skip
    q = batch.q[1:].contiguous().to(backend.device)
    theirs = torch.empty(3, 4, device=backend.device)
    wrapper.run(q, (pages, pages), out=torch.empty_like(q), lse=theirs, return_lse=True)
    expected = torch.tensor([30.0, 31, 32]).log2()[:, None].expand(theirs.shape)
    torch.testing.assert_close(theirs.cpu(), expected, rtol=1e-5, atol=1e-5)


@needs_no_gpu
def test_a_plan_is_made_once_a_step_and_shared_by_all_layers(make_batch, library, share_all):
    backend = FlashInferBackend(CPU)
    options = {"dtype": torch.float16, "head_dim": 128, "page_size": 4, "group": 1}
    batch = make_batch(MIXED, TREES["three levels"][1], **options)
    cache = LayerCache(torch.zeros_like(batch.k_cache), torch.zeros_like(batch.v_cache))
    given = batch.q, batch.k, batch.v, cache

    first = backend.prepare(batch.plan)
    assert not library.plans
    for _ in range(3):
        backend.attend(*given, first, scale=0.2, logit_softcap=9.0)
    assert len(library.plans) == len(library.wrappers) == 5
    for plan in library.plans:
        assert (plan.q, plan.kv, plan.out) == (torch.float16,) * 3
        assert (plan.sm_scale, plan.softcap, plan.window_left) == (0.2, 9.0, -1)
        assert (plan.heads, plan.kv_heads, plan.head_dim, plan.page_size) == (2, 2, 128, 4)
    names = [type(wrapper).__name__ for wrapper in library.wrappers]
    assert names == ["BatchPrefillWithPagedKVCacheWrapper"] * 4 + [
        "BatchDecodeWithPagedKVCacheWrapper"
    ]
    assert [plan.causal for plan in library.plans] == [False, False, False, True, False]

    second = backend.prepare(batch.plan)
    backend.attend(*given, second, scale=0.2, logit_softcap=9.0)
    assert (len(library.plans), len(library.wrappers)) == (10, 5)
    backend.attend(*given, first, scale=0.2, logit_softcap=9.0)  # wrappers hold one step's plan
    assert len(library.plans) == 15
    backend.attend(*given, first, scale=0.2, logit_softcap=9.0, sliding_window=1000)
    assert len(library.wrappers) == 10
    assert {plan.window_left for plan in library.plans[-5:]} == {999}


@needs_no_gpu
def test_a_plan_waits_until_the_one_before_has_left_pinned_memory(make_batch, library, monkeypatch):
    log = []

    class Event:
        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    backend = FlashInferBackend(CPU)
    batch = make_batch([(1, 5)], dtype=torch.bfloat16, head_dim=64)
    kind = LayerKind(None, None, 0.1, 4, 2, 64, 4, *(torch.bfloat16,) * 2)
    wrappers = backend.plan(kind, backend.prepare(batch.plan))
    assert not log  # what is on the host is there at once
    monkeypatch.setattr(wrappers, "_on_gpu", True)
    for _ in range(2):
        backend.plan(kind, backend.prepare(batch.plan))
    assert log == ["record", "wait", "record"]


@needs_no_gpu
@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"head_dim": 80}, r"head_dim is 80.*'flashinfer' has kernels for 64, 128, 256"),
        ({"dtype": torch.float32}, r"dtype is torch.float32.*takes torch.bfloat16, torch.float16"),
        ({"cache_dtype": torch.float16}, r"cache_dtype is torch.float16.*float8_e4m3fn"),
    ],
)
def test_cases_without_kernels_are_refused_by_name(library, change, refusal):
    FlashInferBackend(CPU, CASE)
    with pytest.raises(ValueError, match=refusal):
        FlashInferBackend(CPU, replace(CASE, **change))


@needs_no_gpu
@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({}, lambda case: case.head_dim == 64),
        ({"num_heads": 4}, lambda case: case.wrapper == "BatchDecodeWithPagedKVCacheWrapper"),
        ({"sliding_windows": (None, 9)}, lambda case: case.windowed),
        ({"logit_softcap": 30.0}, lambda case: case.softcapped),
        ({"cache_dtype": torch.float8_e4m3fn}, lambda case: case.kv == torch.float8_e4m3fn),
        # Scales are measured with a cache of the weights' type.
        ({"cache_dtype": torch.float8_e4m3fn}, lambda case: case.kv == torch.bfloat16),
    ],
)
def test_kernels_that_are_not_built_are_refused_by_name(monkeypatch, change, missing):
    case = replace(CASE, **change)
    monkeypatch.setitem(sys.modules, "flashinfer", Library())
    FlashInferBackend(CPU, case)
    monkeypatch.setitem(sys.modules, "flashinfer", Library(lambda case: not missing(case)))
    with pytest.raises(ValueError, match=r"'flashinfer' does not cover.*MissingJITCacheError: JIT"):
        FlashInferBackend(CPU, case)


@needs_no_gpu
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_heads": 2},
        {"sliding_windows": (4096, None, 16, 3), "num_kv_heads": 8},
        {"logit_softcap": 2.0, "page_size": 1},
        {"cache_dtype": torch.float8_e4m3fn, "scale": 1.0},
    ],
    ids=str,
)
def test_what_is_tried_out_is_used(library, make_batch, change):
    """The wrappers of the trial serve the model, whose own case was tried."""
    case = replace(CASE, **change)
    backend = FlashInferBackend(CPU, case)
    made = len(library.wrappers)
    batch = make_batch(
        [(1, 3), (2, 5)], dtype=case.dtype, head_dim=64, page_size=case.page_size,
        kv_heads=case.num_kv_heads, group=case.num_heads // case.num_kv_heads,
    )  # fmt: skip
    cache = [torch.zeros(batch.k_cache.shape, dtype=case.cache_dtype) for _ in range(2)]
    scales = None
    if case.cache_dtype != case.dtype:
        scales = (torch.ones(case.num_kv_heads),) * 2
    for window in case.sliding_windows:
        backend.attend(
            batch.q, batch.k, batch.v, LayerCache(*cache, scales), backend.prepare(batch.plan),
            scale=case.scale, sliding_window=window, logit_softcap=case.logit_softcap,
        )  # fmt: skip
    assert len(library.wrappers) == made


@needs_no_gpu
def test_wrong_results_are_noticed(library, monkeypatch):
    """For example log-sum-exps to another base."""
    run = library.BatchPrefillWithPagedKVCacheWrapper.run

    def natural(self, q, pages, *, lse, **options):
        out, lse = run(self, q, pages, lse=lse, **options)
        return out, lse.mul_(math.log(2))

    monkeypatch.setattr(library.BatchPrefillWithPagedKVCacheWrapper, "run", natural)
    with pytest.raises(ValueError, match="ArithmeticError: its results are wrong"):
        FlashInferBackend(CPU, CASE)


@needs_no_gpu
def test_auto_takes_flashinfer_on_a_gpu_where_it_covers_the_case(library, monkeypatch, caplog):
    """The GPU is played by the CPU, on which Triton interprets kernels here."""
    caplog.set_level(logging.INFO, logger="coppice.kernels")
    gpu = torch.device("cuda")

    def on_cpu(make):
        def made(device, *given, **options):
            assert device == gpu
            return make(CPU, *given, **options)

        return made

    monkeypatch.setattr(backend_module, "FlashInferBackend", on_cpu(FlashInferBackend))
    monkeypatch.setattr(triton_backend, "TritonBackend", on_cpu(triton_backend.TritonBackend))

    def chosen(**options) -> str:
        caplog.clear()
        return select_backend("auto", gpu, **options).name

    assert chosen(case=CASE) == "flashinfer"
    assert "attention runs on FlashInfer, which covers AttentionCase(num_heads=8" in caplog.text
    assert chosen(case=replace(CASE, head_dim=80)) == "triton"
    assert "on Triton, not on FlashInfer: head_dim is 80" in caplog.text
    assert chosen(case=CASE, deterministic=True) == "triton"
    assert "on Triton, not on FlashInfer: deterministic is True" in caplog.text
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert chosen(case=CASE) == "triton"
    assert "on Triton, not on FlashInfer: attention_backend is 'flashinfer', which" in caplog.text
    assert "cannot be imported here" in caplog.text
    assert chosen() == "triton"
    assert not caplog.text


@needs_no_gpu
def test_a_device_that_flashinfer_does_not_run_on_is_named(library, monkeypatch):
    monkeypatch.setattr(gpu_backend, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"device is cpu; attention_backend 'flashinfer' runs on"):
        select_backend("flashinfer", CPU)
    with pytest.raises(ValueError, match=r"deterministic is True.*'flashinfer' takes only False"):
        select_backend("flashinfer", CPU, deterministic=True)


@needs_no_gpu
def test_log_sum_exps_that_nobody_reads_stay_as_they_are(make_batch, backend, monkeypatch):
    """One launch less a layer; results are the same."""
    batch = make_batch([(1, 9), (1, 30), (3, 2)], dtype=torch.bfloat16, head_dim=64, page_size=16)
    cache = LayerCache(batch.k_cache.clone(), batch.v_cache.clone())
    backend.write_kv(batch.k, batch.v, cache, batch.slots)
    prepared = backend.prepare(batch.plan)

    def attend(**options):
        given = batch.q, batch.k, batch.v, cache, prepared
        return backend.attend(*given, scale=batch.scale, **options)

    natural = attend()
    monkeypatch.setattr(wrappers_module, "merge_parts", None)
    as_they_are = attend(lse_read=False)
    assert torch.equal(natural[0], as_they_are[0])
    torch.testing.assert_close(natural[1], as_they_are[1].mul(math.log(2)))
