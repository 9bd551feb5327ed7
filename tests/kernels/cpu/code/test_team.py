"""Threads that go through compiled code together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")

from coppice.kernels.cpu.code import threads  # noqa: E402
from coppice.kernels.cpu.code.team import (  # noqa: E402
    came_together,
    gathered,
    meet,
    member,
    new_team,
)
from coppice.kernels.cpu.layer.matmul import float_products  # noqa: E402

ROUNDS = 2000


@numba.njit(parallel=True)
def _count_rounds(members: int, state: int, counts: np.ndarray, seen: np.ndarray) -> None:
    """Each member adds to its own count and, when all have, compares the counts of all."""
    for me in numba.prange(members):
        if gathered(state, members):
            team, met = member(me, members, state), 0
            for turn in range(ROUNDS):
                counts[me] += 1
                met = meet(team, met)
                for other in range(members):
                    if counts[other] != turn + 1:
                        seen[me] += 1
                met = meet(team, met)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield threads.use_torch_threads()
    torch.set_num_threads(before)
    threads.use_torch_threads()


def test_nobody_leaves_a_meeting_before_all_have_come(two_threads):
    members = two_threads
    state = new_team()
    counts, seen = np.zeros(members, np.int64), np.zeros(members, np.int64)
    _count_rounds(members, state.ctypes.data, counts, seen)
    assert came_together(state)
    assert counts.tolist() == [ROUNDS] * members
    assert not seen.any(), "a member saw a count of another round"


def test_one_alone_meets_nobody():
    state = new_team()
    assert gathered(state.ctypes.data, 1)
    assert meet(member(0, 1, state.ctypes.data), 0) == 0
    assert came_together(state)


def test_a_thread_that_waits_in_vain_ends_the_team():
    state = new_team()
    assert not gathered(state.ctypes.data, 2)
    assert not came_together(state)
    assert not gathered(state.ctypes.data, 2), "a thread that comes later does not begin"


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "int8"], ids=str)
def test_where_threads_run_one_after_the_other_one_does_all(kind):
    """As numba's threading layers may have them; here there is one thread for two shares."""
    x = torch.randn(40, 576, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(1000, 576, generator=torch.Generator().manual_seed(1))
    if kind == "int8":
        from coppice.kernels.cpu.layer.matmul import int8_products

        if int8_products.panel_kernels() is None:
            pytest.skip("no compiled products of int8")
        packed = int8_products.pack((weight * 30).clamp(-127, 127).to(torch.int8))
        scale = torch.ones(1000)

        def product():
            return int8_products.multiply(x, packed, scale, None)
    else:
        if float_products.float_kernels() is None:
            pytest.skip("no compiled products of panels")
        packed = float_products.pack(weight.to(kind))

        def product():
            return float_products.multiply(x, packed, None)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        threads.use_torch_threads()
        expected = product()
        numba.set_num_threads(1)
        assert torch.equal(product(), expected)
    finally:
        torch.set_num_threads(before)
        threads.use_torch_threads()
