"""Rows of a sequence that are a tree of tokens: each sees its ancestors, and nobody else's."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice.kernels.attention.branches import MOST_BRANCHED, Branches
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.backends import select_backend
from coppice.kernels.schedule import cost

REFERENCE = ReferenceBackend()
# A tree of 7 rows and one of 63 beside a chunk, a chain and sequences of one row.
TAILS = [(1, 5), (7, 9), (4, 2), (MOST_BRANCHED, 13), (3, 0), (1, 0)]
LEVELS = [(range(6), 3), ([1, 2, 3], 2)]


def random_tree(rng: random.Random, rows: int) -> list[int]:
    """The row before each row but the first: now a chain, now a branch."""
    return [rng.choice([row, row, rng.randrange(row + 1)]) for row in range(rows - 1)]


def trees(seed: int, tails=TAILS) -> dict[int, list[int]]:
    rng = random.Random(seed)
    return {i: random_tree(rng, rows) for i, (rows, _) in enumerate(tails) if i in (1, 3)}


@pytest.fixture(params=["cpu", "torch", "triton_backend"])
def branching(request, monkeypatch):
    if request.param == "triton_backend":
        return request.getfixturevalue("triton_backend")
    backend = select_backend("cpu", torch.device("cpu"))
    if request.param == "torch":
        from coppice.kernels.cpu.attention import torch_items

        monkeypatch.setattr(backend, "_kernels", torch_items)
    return backend


def agree(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, check_dtype=False)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_the_reference_is_brute_force(make_batch, window):
    batch = make_batch(TAILS, LEVELS, trees=trees(1))
    agree(batch.run(REFERENCE, window), batch.dense(window))


@pytest.mark.parametrize("shared", [-(10**9), 10**9], ids=["shared", "alone"])
@pytest.mark.parametrize(
    ("window", "group", "page_size"),
    [
        (None, 1, 4),
        pytest.param(None, 5, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, 16, marks=pytest.mark.slow),
        (30, 2, 4),
    ],
)
def test_every_backend_is_the_reference(
    make_batch, branching, monkeypatch, window, group, page_size, shared
):
    monkeypatch.setattr(cost.CostModel, "row_bytes", shared)
    batch = make_batch(TAILS, LEVELS, group=group, page_size=page_size, trees=trees(group))
    agree(batch.run(branching, window), batch.run(REFERENCE, window))


def test_deterministic_kernels_refuse_branches_by_name(make_batch, triton_backend):
    """The tiles of a row's keys would depend on the branches before it."""
    backend = select_backend("triton", triton_backend.device, deterministic=True)
    assert triton_backend.branches and not backend.branches
    batch = make_batch(TAILS, LEVELS, trees=trees(7))
    with pytest.raises(ValueError, match="branches of the plan are given; with deterministic"):
        backend.prepare(batch.plan)


def test_a_chain_is_a_chunk(make_batch, branching):
    """A tree without branches has the results of the same rows that are none, bit for bit."""
    plain = make_batch(TAILS, LEVELS)
    chain = make_batch(TAILS, LEVELS, trees={1: range(6), 3: range(MOST_BRANCHED - 1)})
    for got, expected in zip(chain.run(branching), plain.run(branching), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_branches_in_a_graph(make_batch, triton_backend, fine_splits):
    """Plans with trees, with chains, and with neither, one after another in the same places."""
    tails = [[(3, 9), (4, 2), (1, 7)], [(8, 5)], [(1, 3)] * 8, [(6, 30), (2, 1)]]
    given = [{0: [0, 0], 1: [0, 1, 1]}, {0: [0, 1, 1, 0, 4, 5, 2]}, {}, {}]
    backend = select_backend("triton", triton_backend.device)
    if backend.device.type == "cpu":
        backend._multiprocessors = 2
    batches = [make_batch(each, (), trees=tree) for each, tree in zip(tails, given, strict=True)]
    options = {"page_size": 4, "num_pages": 100, "max_pages": 64}
    fixed = backend.fixed_plans((8,), branches=True, **options)[0][0]
    plain = backend.fixed_plans((8,), **options)[0][0]
    for batch, tree in zip([*batches, *reversed(batches)], [*given, *reversed(given)], strict=True):
        for place in (fixed, plain):
            loaded = place.load(batch.plan)
            assert loaded is (place is fixed or not tree)
            if loaded:
                agree(batch.run(backend, prepared=place), batch.run(REFERENCE))


def test_trees_of_the_flashinfer_backend_run_by_our_kernels(
    make_batch, flashinfer_backend, triton_backend
):
    batch = make_batch(TAILS, LEVELS, group=2, trees=trees(1), dtype=torch.bfloat16, head_dim=64)
    assert flashinfer_backend.branches
    for window in (None, 5):
        got, expected = (batch.run(each, window) for each in (flashinfer_backend, triton_backend))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    size, options = batch.plan.num_rows, {"page_size": 4, "max_pages": 64}
    for branches in (True, False):
        (places,) = flashinfer_backend.fixed_plans(
            (size,), num_pages=batch.num_pages, branches=branches, **options
        )
        assert [place.load(batch.plan) for place in places].count(True) == branches


def test_slots_are_moved_in_any_order(make_batch, branching):
    from coppice.kernels.attention.interface import LayerCache

    device = getattr(branching, "device", torch.device("cpu"))
    k, v = (torch.randn(3, 4, 2, 8).to(device) for _ in range(2))
    before = k.flatten(0, 1).clone(), v.flatten(0, 1).clone()
    branching.move_slots([LayerCache(k, v)], [5, 7, 11], [4, 5, 7])
    for now, old in zip((k, v), before, strict=True):
        expected = old.clone()
        expected[[4, 5, 7]] = old[[5, 7, 11]]
        assert (now.flatten(0, 1) == expected).all()
    branching.move_slots([LayerCache(k, v)], [], [])


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("seen", 3, 0b0010, "row 3, number 2 of its sequence"),  # not itself
        ("seen", 3, 0b0110, "the bits of that number, of the tree's root"),  # not the root
        ("seen", 2, 0b1011, "of no later row"),
        ("seen", 0, 1, "positions of branches is 5|seen of branches"),  # a tree of a lone row
        ("positions", 3, 11, "positions of branches is 11 in row 3; it must be 10"),
        ("positions", 0, 4, "it must be 5"),
    ],
)
def test_bad_branches_are_refused(make_batch, name, row, value, message):
    batch = make_batch([(1, 5), (4, 9)], trees={1: [0, 0, 1]})
    plan = batch.plan
    plan.check()
    array = getattr(plan.branches, name).copy()
    array[row] = value
    bad = replace(plan, branches=replace(plan.branches, **{name: array}))
    if (name, row) == ("seen", 0):
        bad.check()  # it sees itself, as ever
        return
    with pytest.raises(ValueError, match=message):
        bad.check()
    wrong = Branches(np.zeros(2, np.int32), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="positions of branches is int32"):
        replace(plan, branches=wrong).check()
