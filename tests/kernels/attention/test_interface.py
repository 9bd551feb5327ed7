"""What breaks the interface's rules is refused by name, and writes to the cache are right."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice.kernels.attention.interface import LayerCache, SharedStretch
from coppice.kernels.backends import select_backend


@pytest.fixture(params=["cpu", "reference", "triton"])
def backend(request):
    if request.param in ("triton", "flashinfer"):  # as other tests use them: made once
        return request.getfixturevalue(f"{request.param}_backend")
    return select_backend(request.param, torch.device("cpu"))


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


TAILS = [(1, 6), (3, 2), (1, 3)]
SHARED = [(range(3), 2)]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"page_size": 0}, "page_size"),
        ({"query_start": ints(0, 1, 4, 5).astype(np.int64)}, "query_start"),
        ({"query_start": ints(0, 1, 1, 2)}, "query_start"),
        ({"query_start": ints(0, 1, 4)}, "query_start"),
        ({"query_start": ints(0, 0, 1, 0, 4, 0, 5, 0)[::2]}, "query_start"),
        ({"context_len": ints()}, "context_len"),
        ({"context_len": ints(15, 2, 12)}, r"context_len\[1\]"),
        ({"context_len": ints(99, 13, 12)}, r"context_len\[0\]"),
        ({"page_indptr": ints(0, 4, 8, 12)}, "page_indptr"),
        ({"page_indptr": ints(1, 4, 8, 11)}, "page_indptr"),
        ({"page_indices": ints(*range(10), 99)}, "page_indices holds 99"),
        ({"page_indices": ints(*range(10), -1)}, "page_indices holds -1"),
        ({"page_indices": [0] * 11}, "page_indices"),
        ({"page_indices": ints(*range(10), 0)}, "pages of sequences 0 and 1 differ"),
        ({"stretches": (SharedStretch(0, 2, ints(0)),)}, "members"),
        ({"stretches": (SharedStretch(0, 2, ints(1, 0)),)}, "members"),
        ({"stretches": (SharedStretch(0, 2, ints(0, 3)),)}, "members"),
        ({"stretches": (SharedStretch(0, 2, np.array([0, 1])),)}, "members"),
        ({"stretches": (SharedStretch(0, 0, ints(0, 1)),)}, "num_pages"),
        ({"stretches": (SharedStretch(1, 1, ints(0, 1)),)}, "first_page"),
        ({"stretches": (SharedStretch(0, 1, ints(0, 1)),) * 2}, "first_page"),
        ({"stretches": (SharedStretch(0, 3, ints(0, 1)),)}, "num_pages"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference", "triton", "flashinfer"], indirect=True)
def test_bad_plan_is_refused(make_batch, backend, change, names):
    batch = make_batch(TAILS, SHARED)
    backend.prepare(batch.plan, num_pages=batch.num_pages)
    with pytest.raises(ValueError, match=names):
        backend.prepare(replace(batch.plan, **change), num_pages=batch.num_pages)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"q": torch.zeros(4, 4, 16)}, "q is"),
        ({"q": torch.zeros(5, 3, 16)}, "q has 3 heads"),
        ({"q": torch.zeros(5, 4, 8)}, "q is"),
        ({"q": torch.zeros(5, 4, 16, dtype=torch.float64)}, "q is torch.float64"),
        ({"q": torch.zeros(4, 5, 16).transpose(0, 1)}, "strides"),
        ({"k": torch.zeros(5, 1, 16)}, "k is"),
        ({"v": torch.zeros(4, 2, 16)}, "v has 4 rows"),
        ({"k": torch.zeros(5, 2, 16, dtype=torch.float16)}, "k is torch.float16"),
        ({"cache": LayerCache(torch.zeros(20, 2, 2, 16), torch.zeros(20, 4, 2, 16))}, "cache.v is"),
        ({"cache": LayerCache(*torch.zeros(2, 20, 2, 4, 16).transpose(2, 3))}, "cache.k is"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_bad_tensors_are_refused(make_batch, backend, change, names):
    batch = make_batch(TAILS, SHARED)
    given = {
        "q": batch.q,
        "k": batch.k,
        "v": batch.v,
        "cache": LayerCache(batch.k_cache, batch.v_cache),
        "sliding_window": None,
        "prepared": backend.prepare(batch.plan),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=names):
        backend.attend(**(given | change))


def test_page_size_of_plan_and_cache_must_agree(make_batch, backend):
    batch = make_batch(TAILS, page_size=4)
    other = make_batch(TAILS, page_size=8)
    with pytest.raises(ValueError, match="page_size is 4"):
        backend.attend(
            batch.q, batch.k, batch.v, LayerCache(other.k_cache, other.v_cache),
            backend.prepare(batch.plan), scale=1.0,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_cpu_backend_refuses_other_types_by_name(dtype):
    backend = select_backend("cpu", torch.device("cpu"))
    cache = torch.zeros(2, 4, 1, 8, dtype=dtype)
    with pytest.raises(ValueError, match=rf"cache.k is {dtype}.*torch.float32"):
        backend.write_kv(cache[0], cache[0], LayerCache(cache, cache), torch.arange(4))


def test_write_kv_touches_its_slots_only(backend):
    device = getattr(backend, "device", torch.device("cpu"))
    k_cache, v_cache = torch.randn(2, 5, 4, 2, 8, device=device)
    before = k_cache.clone(), v_cache.clone()
    k, v = torch.randn(2, 3, 2, 8, device=device)
    slots = torch.tensor([19, 0, 6], device=device)
    backend.write_kv(k, v, LayerCache(k_cache, v_cache), slots)
    for cache, new, old in zip((k_cache, v_cache), (k, v), before, strict=True):
        old.view(20, 2, 8)[[19, 0, 6]] = new
        assert torch.equal(cache, old)


def test_copy_pages_in_all_layers(backend):
    device = getattr(backend, "device", torch.device("cpu"))
    caches = [LayerCache(*torch.randn(2, 5, 4, 2, 8, device=device)) for _ in range(3)]
    before = [(layer.k.clone(), layer.v.clone()) for layer in caches]
    backend.copy_pages(caches, [4, 1], [0, 3])
    backend.copy_pages(caches, [], [])
    for layer, old in zip(caches, before, strict=True):
        for pages, was in zip((layer.k, layer.v), old, strict=True):
            assert torch.equal(pages, was[[4, 1, 2, 1, 4]])


@pytest.mark.parametrize(
    ("src", "dst", "names"),
    [
        ([0], [5], "dst"),
        ([-1], [0], "src"),
        ([0, 1], [2], "dst"),
        ([0, 1], [2, 2], "dst"),
        ([0, 1], [1, 2], "dst"),
    ],
)
def test_bad_copies_are_refused(backend, src, dst, names):
    caches = [LayerCache(torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 8))]
    with pytest.raises(ValueError, match=names):
        backend.copy_pages(caches, src, dst)


def test_backends_are_chosen_by_name():
    device = torch.device("cpu")
    assert select_backend("auto", device).name == "cpu"
    assert select_backend("cpu", device).name == "cpu"
    assert select_backend("reference", device).name == "reference"
    allowed = "'auto', 'cpu', 'triton', 'flashinfer' or 'reference'"
    with pytest.raises(ValueError, match=rf"attention_backend is 'abacus'; it must be {allowed}"):
        select_backend("abacus", device)
    with pytest.raises(ValueError, match="device is cuda"):
        select_backend("cpu", torch.device("cuda"))


@pytest.mark.parametrize("name", ["auto", "cpu", "flashinfer", "reference"])
def test_deterministic_is_refused_by_backends_other_than_triton(name):
    with pytest.raises(ValueError, match=r"deterministic is True.*'triton'"):
        select_backend(name, torch.device("cpu"), deterministic=True)


def test_triton_runs_where_its_kernels_do():
    if torch.cuda.is_available():
        assert select_backend("auto", torch.device("cuda")).name == "triton"
        with pytest.raises(ValueError, match=r"device is cpu.*'cuda' only"):
            select_backend("triton", torch.device("cpu"))
    else:
        assert select_backend("triton", torch.device("cpu")).name == "triton"
        with pytest.raises(ValueError, match=r"device is cuda.*TRITON_INTERPRET"):
            select_backend("triton", torch.device("cuda"))


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_triton_that_is_not_installed_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "coppice.kernels.triton.backend", None)
    with pytest.raises(ValueError, match=rf"attention_backend is '{name}'.*not installed"):
        select_backend(name, torch.device("cpu"))


def test_flashinfer_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match=r"'flashinfer', which cannot be imported.*or take 'tri"):
        select_backend("flashinfer", device)


def test_cpu_backend_refuses_what_it_cannot_do(make_batch):
    batch = make_batch(TAILS)
    backend = select_backend("cpu", torch.device("cpu"))
    tensors = batch.k_cache, batch.v_cache
    given = batch.q, batch.k, batch.v
    prepared = backend.prepare(batch.plan)
    scales = torch.ones(2), torch.ones(2)
    with pytest.raises(ValueError, match="scales is given; it must be None"):
        backend.attend(*given, LayerCache(*tensors, scales), prepared, scale=1.0)
    small = LayerCache(*(each.to(torch.float8_e4m3fn) for each in tensors), scales)
    with pytest.raises(ValueError, match=r"cache.k is torch.float8_e4m3fn; the cpu backend"):
        backend.write_kv(batch.k, batch.v, small, batch.slots)


@pytest.mark.parametrize("backend", ["reference", "triton"], indirect=True)
def test_scales_must_fit_the_cache(make_batch, backend):
    batch = make_batch(TAILS)
    small = [cache.to(torch.float8_e4m3fn) for cache in (batch.k_cache, batch.v_cache)]
    given = batch.k, batch.v
    with pytest.raises(ValueError, match="scales is None; it must be two float32"):
        backend.write_kv(*given, LayerCache(*small), batch.slots)
    with pytest.raises(ValueError, match=r"scales of v is torch.float32 \(3,\).*\(2,\)"):
        backend.write_kv(*given, LayerCache(*small, (torch.ones(2), torch.ones(3))), batch.slots)
    with pytest.raises(ValueError, match="logit_softcap is 0; it must be None or above 0"):
        batch.run(backend, softcap=0)
