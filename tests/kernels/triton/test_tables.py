"""Page tables that lie on the device: plans point there, and nothing is sent of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.backends import select_backend
from coppice.kernels.transfer import Outbox

TAILS, STRETCHES = [(1, 9), (1, 2), (1, 21), (1, 0)], [(range(4), 3), ([1, 2], 2)]


@pytest.fixture
def backend(triton_backend):
    return select_backend("triton", triton_backend.device)


def lay_out(backend, plan):
    """Tables in places far apart, in another order; the plan then has no page ids of its own."""
    lengths = np.diff(plan.page_indptr)
    order = np.random.default_rng(3).permutation(len(lengths))
    room = int(lengths.max()) + 5
    starts = (1 + order * room).astype(np.int32)
    line = np.full(1 + len(lengths) * room, 10**6, np.int32)
    for start, first, length in zip(starts, plan.page_indptr, lengths, strict=False):
        line[start : start + length] = plan.page_indices[first : first + length]
    backend.tables = torch.from_numpy(line).to(backend.device)
    return replace(plan, table_start=starts, page_indices=np.zeros_like(plan.page_indices))


def agree(got, expected):
    for found, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_a_plan_is_read_from_there(make_batch, backend, fine_splits):
    batch = make_batch([(2, 5), (1, 9)], [(range(2), 2)])
    expected = batch.run(ReferenceBackend())
    prepared = backend.prepare(lay_out(backend, batch.plan))
    agree(batch.run(backend, prepared=prepared), expected)


def test_a_graph_reads_them_from_there(make_batch, backend, fine_splits):
    batch = make_batch(TAILS, STRETCHES)
    plan = lay_out(backend, batch.plan)
    ((fixed,),) = backend.fixed_plans((4,), page_size=4, num_pages=100, max_pages=64)
    assert fixed.load(plan)
    agree(batch.run(backend, prepared=fixed), batch.run(ReferenceBackend()))
    model = backend.cost_model(4, 2, 16, torch.float32, torch.float32)
    assert fixed.schedule(None, model).page_indices is backend.tables
    assert not fixed.load(batch.plan), "it has no room for page ids"
    backend.tables = None
    ((other,),) = backend.fixed_plans((4,), page_size=4, num_pages=100, max_pages=64)
    assert other.load(batch.plan) and not other.load(plan)


def test_layers_like_those_of_the_step_before_are_sent_for_together(make_batch, backend):
    """One transfer takes the schedules of all kinds of layers."""
    batches = [make_batch([(1, 5), (2, 3)], seed=seed) for seed in range(3)]
    sent = []

    class Counted(Outbox):
        def send(self):
            sent.append(self)
            super().send()

    for number, batch in enumerate(batches):
        outbox = Counted(backend.device)
        prepared = backend.prepare(batch.plan, outbox=outbox)
        outbox.send()
        for window in (None, 4) if number < 2 else (4,):
            agree(
                batch.run(backend, window, prepared=prepared),
                batch.run(ReferenceBackend(), window),
            )
    assert [len(each._parcels) for each in sent] == [0, 2, 2]
    # What no layer of the last step asked for is not made again.
    outbox = Counted(backend.device)
    backend.prepare(batches[0].plan, outbox=outbox)
    assert len(outbox._parcels) == 1


def test_what_is_not_there_is_refused(make_batch, backend):
    plan = lay_out(backend, make_batch(TAILS, STRETCHES).plan)
    with pytest.raises(ValueError, match=r"table_start of the plan is .* lie within the"):
        backend.prepare(replace(plan, table_start=plan.table_start + 40))
    with pytest.raises(ValueError, match="table_start has 3 entries; it must have 4"):
        backend.prepare(replace(plan, table_start=plan.table_start[1:]))
    backend.tables = None
    with pytest.raises(ValueError, match="table_start of the plan is given; without tables"):
        backend.prepare(plan)
