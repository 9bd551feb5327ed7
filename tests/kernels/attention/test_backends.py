"""Every backend gives the answers of the reference, and that gives those of brute force."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees import LEVELS, MIXED

from coppice.kernels.attention.interface import AttentionBackend, LayerCache
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.backends import select_backend
from coppice.kernels.cpu import backend as cpu
from coppice.kernels.cpu.attention import numba_items
from coppice.kernels.flashinfer.backend import HEAD_DIMS, FlashInferBackend
from coppice.kernels.schedule import cost
from coppice.kernels.schedule.cpu import build_cpu_schedule

REFERENCE = ReferenceBackend()
# What a row's partial result costs, in bytes: then everything is shared, or nothing.
SHARE_ALL, SHARE_NONE = -(10**9), 10**9


@pytest.fixture(scope="module")
def compiled() -> AttentionBackend:
    backend = select_backend("cpu", torch.device("cpu"))
    assert backend.compiles(4, 2)
    return backend


@pytest.fixture(scope="module")
def fallen_back() -> AttentionBackend:
    """The CPU backend as it is where numba cannot be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        patch.delitem(sys.modules, "coppice.kernels.cpu.attention.numba_items", raising=False)
        patch.delattr("coppice.kernels.cpu.attention.numba_items", raising=False)
        backend = cpu.CpuBackend()
    assert not backend.compiles(4, 2)
    return backend


@pytest.fixture(params=["compiled", "fallen_back"])
def cpu_backend(request) -> AttentionBackend:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["compiled", "fallen_back", "triton_backend", "flashinfer_backend"])
def backend(request) -> AttentionBackend:
    return request.getfixturevalue(request.param)


@pytest.fixture
def agree_in_every_way(compiled, fallen_back, monkeypatch):
    """Compare with the reference: compiled and fallen back, sharing forced and forbidden."""

    def compare(batch, window=None) -> None:
        expected = batch.run(REFERENCE, window)
        for row_bytes in (SHARE_ALL, SHARE_NONE):
            monkeypatch.setattr(cost.CostModel, "row_bytes", row_bytes)
            agree(batch.run(compiled, window), expected)
            agree(batch.run(fallen_back, window), expected)

    return compare


def agree(got, expected) -> None:
    wide = expected[0].dtype.itemsize > 2
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype in (b.dtype, torch.float32)
        tolerance = 2e-5
        if b.dtype.itemsize == 2:
            # Partial results and those merged from them are rounded to 16 bits.
            tolerance = 2 * torch.finfo(b.dtype).eps
        elif not wide and torch.cuda.is_available():
            # The kernels add up exponentials that are rounded to 16 bits.
            tolerance = 5e-3
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("stretches", [(), LEVELS], ids=["private", "three levels"])
def test_reference_equals_brute_force(make_batch, stretches, window):
    batch = make_batch(MIXED, stretches)
    agree(batch.run(REFERENCE, window), batch.dense(window))


@pytest.mark.parametrize(
    ("shape", "window", "stretches"),
    [
        ({"group": 1, "head_dim": 64, "page_size": 16}, None, LEVELS),
        ({"group": 3, "head_dim": 80, "page_size": 1}, None, ()),
        ({"group": 4, "head_dim": 96, "page_size": 64, "shuffled": False}, 5, LEVELS),
        ({"group": 7, "head_dim": 128, "page_size": 32, "kv_heads": 1}, None, LEVELS),
        ({"group": 8, "head_dim": 256, "page_size": 16, "kv_heads": 1}, 40, ()),
        ({"group": 2, "head_dim": 64, "page_size": 256, "kv_heads": 1}, None, [(range(7), 1)]),
        ({"group": 5, "head_dim": 24, "page_size": 4, "kv_heads": 3}, 1, LEVELS),
    ],
    ids=str,
)
def test_shapes(make_batch, backend, size, shape, window, stretches):
    """Each head dimension, page size, group and kind of window that a model may come with."""
    grown = [(rows, cached * size) for rows, cached in MIXED]
    batch = make_batch(grown, stretches, **shape)
    if backend.name == "flashinfer":
        if batch.head_dim not in HEAD_DIMS:
            with pytest.raises(ValueError, match=rf"head_dim is {batch.head_dim}.* 64, 128, 256"):
                batch.run(backend, window)
            return
        if backend.device.type == "cuda":
            try:
                FlashInferBackend(backend.device, batch.case(window))
            except ValueError as error:
                pytest.skip(str(error))
    agree(batch.run(backend, window), batch.run(REFERENCE, window))


@pytest.mark.parametrize("stretches", [(), LEVELS], ids=["private", "three levels"])
def test_more_heads_of_a_kv_head_than_the_compiled_kernels_take(make_batch, compiled, stretches):
    group = numba_items.MOST_LANES + 1
    assert compiled.compiles(group - 1, 1)
    assert not compiled.compiles(group, 1)
    assert compiled.compiles(group, 2)
    for heads in (group - 1, group):
        batch = make_batch(MIXED, stretches, group=heads, kv_heads=1, head_dim=8)
        agree(batch.run(compiled), batch.run(REFERENCE))


def test_odd_heads_are_refused(make_batch, cpu_backend):
    with pytest.raises(ValueError, match="q has heads of 5; the cpu backend needs an even number"):
        make_batch(MIXED, head_dim=5).run(cpu_backend)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
def test_heads(make_batch, agree_in_every_way, group, head_dim):
    agree_in_every_way(make_batch(MIXED, LEVELS, group=group, head_dim=head_dim))


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("shuffled", [False, True], ids=["neighbours", "shuffled"])
@pytest.mark.parametrize("stretches", [(), LEVELS], ids=["private", "three levels"])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_pages_and_windows(make_batch, agree_in_every_way, page_size, shuffled, stretches, window):
    batch = make_batch(MIXED, stretches, page_size=page_size, shuffled=shuffled)
    agree_in_every_way(batch, window)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("tails", [[(1, 70)], MIXED], ids=["one row", "mixed"])
def test_soft_cap(make_batch, cpu_backend, softcap, group, tails):
    batch = make_batch(tails, group=group, head_dim=32)
    batch.scale = 3.0
    for got, expected in zip(
        batch.run(cpu_backend, 20, softcap), batch.run(REFERENCE, 20, softcap), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("cached", [0, 1, 3, 4, 5, 63, 64, 65])
def test_lengths_at_borders(make_batch, agree_in_every_way, rows, cached):
    """Around a page's end (4) and around the end of the compiled kernel's tile (64)."""
    agree_in_every_way(make_batch([(rows, cached), (1, 0), (1, cached)], group=3))


@pytest.mark.parametrize("window", [None, 50, 333])
def test_long_chunk_over_long_prefix(make_batch, cpu_backend, window):
    """Several tiles and items, some of whose keys no row or not every row sees."""
    batch = make_batch([(300, 1300), (1, 1500)], [([0, 1], 80)], page_size=8, group=1, kv_heads=1)
    agree(batch.run(cpu_backend, window), batch.run(REFERENCE, window))


@pytest.mark.parametrize("shuffled", [False, True], ids=["views", "copies"])
def test_long_stretch_with_few_rows(make_batch, backend, shuffled):
    batch = make_batch([(1, 5), (1, 0), (2, 9)], [(range(3), 40)], page_size=16, shuffled=shuffled)
    agree(batch.run(backend), batch.run(REFERENCE))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("tails", [[(1, 900)], [(1, 40)] * 9, [(1, 3), (1, 700), (1, 90), (1, 1)]])
def test_any_number_of_threads(make_batch, cpu_backend, threads, tails):
    """One long sequence is cut among threads and merged; many short ones are dealt out."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        batch = make_batch(tails)
        agree(batch.run(cpu_backend), batch.run(REFERENCE))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("stretches", [(), [(range(3), 12), (range(2), 5)]], ids=["flat", "tree"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("found_anew", [False, True])
def test_the_schedule_of_growing_sequences(make_batch, monkeypatch, stretches, threads, found_anew):
    """The schedule of a step serves later ones, and is made anew where it would be wrong."""
    backend, made = cpu.CpuBackend(), []

    def build(plan, *rest):
        made.append(plan)
        return build_cpu_schedule(plan, *rest)

    monkeypatch.setattr(cpu, "build_cpu_schedule", build)
    monkeypatch.setattr(cost.CostModel, "row_bytes", SHARE_ALL)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = make_batch([(1, 300), (1, 7), (1, 20)], stretches)
        for grown, times in [(0, 1), (1, 1), (5, 1), (32, 1), (33, 2), (34, 2), (33, 2), (1, 3)]:
            batch = make_batch([(1, 300 + grown), (1, 7 + grown), (1, 20 + grown)], stretches)
            if not found_anew:
                batch.plan.stretches = first.plan.stretches
            agree(batch.run(backend), batch.run(REFERENCE))
            assert len(made) == times
        # Other sequences share, or there are more rows: the kept schedule does not hold.
        for tails in ([(1, 301), (1, 8), (1, 21)], [(2, 300), (1, 8), (1, 21)]):
            batch = make_batch(tails, [(range(2), 12)])
            agree(batch.run(backend), batch.run(REFERENCE))
        assert len(made) == 5
    finally:
        torch.set_num_threads(before)


def test_large_scores(make_batch, backend):
    """Scores of hundreds: softmax is a hard choice, and nothing overflows."""
    batch = make_batch(MIXED, LEVELS)
    batch.scale = 100.0
    agree(batch.run(backend), batch.run(REFERENCE))


@st.composite
def _random_batches(draw):
    count = draw(st.integers(1, 5))
    tails = [(draw(st.integers(1, 9)), draw(st.integers(0, 20))) for _ in range(count)]
    stretches, groups = [], [list(range(count))]
    for _ in range(3):
        split = []
        for members in groups:
            if len(members) >= 2:
                if pages := draw(st.integers(0, 3)):
                    stretches.append((members, pages))
                at = draw(st.integers(0, len(members)))
                split += [members[:at], members[at:]]
        groups = split
    return tails, stretches


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=_random_batches(),
    page_size=st.sampled_from([1, 2, 4, 16]),
    group=st.integers(1, 4),
    window=st.none() | st.integers(1, 60),
    seed=st.integers(0, 1000),
    row_bytes=st.sampled_from([SHARE_ALL, 2000, SHARE_NONE]),
)
def test_random_batches(make_batch, compiled, shape, page_size, group, window, seed, row_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost.CostModel, "row_bytes", row_bytes)
        batch = make_batch(*shape, page_size=page_size, group=group, seed=seed)
        agree(batch.run(compiled, window), batch.run(REFERENCE, window))


def test_same_plan_serves_layers_with_different_windows(make_batch, compiled):
    batch = make_batch(MIXED, LEVELS)
    cache = LayerCache(batch.k_cache.clone(), batch.v_cache.clone())
    compiled.write_kv(batch.k, batch.v, cache, batch.slots)
    prepared = compiled.prepare(batch.plan)
    for window in (None, 5, None, 9, 5):
        out, _ = compiled.attend(
            batch.q, batch.k, batch.v, cache, prepared, scale=batch.scale, sliding_window=window
        )
        torch.testing.assert_close(out, batch.run(REFERENCE, window)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["compiled", "triton_backend"], indirect=True)
def test_decode_reads_nothing_before_the_window(make_batch, backend):
    """Keys that no row may see are poisoned; a read of them, even at weight 0, would show."""
    batch = make_batch([(1, 90), (2, 60), (150, 70)], [(range(3), 4)], page_size=4)
    window = 20
    expected = batch.run(REFERENCE, window)
    for i, (rows, _) in enumerate(batch.tails):
        first_seen = int(batch.plan.context_len[i]) - rows - window + 1
        for page in batch.tables[i][: first_seen // 4]:
            batch.k_cache[page] = float("nan")
            batch.v_cache[page] = float("nan")
    agree(batch.run(backend, window), expected)


def test_missing_numba_is_logged_once(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "coppice.kernels.cpu.attention.numba_items", raising=False)
    monkeypatch.delattr("coppice.kernels.cpu.attention.numba_items", raising=False)
    with caplog.at_level(logging.WARNING, logger="coppice.kernels"):
        cpu.CpuBackend()
    assert len(caplog.records) == 1
    assert "numba" in caplog.text
    assert "plain torch" in caplog.text


def test_kernels_that_fail_to_compile_are_replaced(caplog, monkeypatch, make_batch):
    def fail(kernels):
        raise RuntimeError("no such processor\nand a long trace")

    monkeypatch.setattr(cpu, "_try_out", fail)
    with caplog.at_level(logging.WARNING, logger="coppice.kernels"):
        backend = cpu.CpuBackend()
    assert "RuntimeError: no such processor" in caplog.text
    batch = make_batch(MIXED)
    agree(batch.run(backend), batch.run(REFERENCE))
