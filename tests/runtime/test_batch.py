"""The shared stretches of a batch against a naive search, and the layout of a mixed batch."""

from array import array

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from coppice.runtime.batch import build_batch, shared_stretches
from coppice.runtime.request import Request, Sequence
from coppice.runtime.sampling_params import SamplingParams
from coppice.runtime.scheduler import Chunk, Schedule


def naive_stretches(tables):
    """Every page that two or more tables have at the same place, with the same pages before it."""
    groups = {}
    for owner, table in enumerate(tables):
        for index in range(len(table)):
            groups.setdefault(tuple(table[: index + 1]), []).append(owner)
    return {(len(prefix) - 1, tuple(m)) for prefix, m in groups.items() if len(m) > 1}


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=9))
def test_stretches_are_exactly_the_shared_pages_at_every_level(tables):
    stretches = shared_stretches(
        [np.array(table, np.int32).tobytes() for table in tables], [len(t) for t in tables]
    )
    found = []
    for stretch in stretches:
        assert stretch.num_pages > 0 and stretch.members.dtype == np.int32
        for index in range(stretch.first_page, stretch.first_page + stretch.num_pages):
            found.append((index, tuple(stretch.members.tolist())))
    assert len(found) == len(set(found))
    assert set(found) == naive_stretches(tables)
    # As few stretches as levels: one that ends where another with the same members begins is split.
    ends = {(s.first_page + s.num_pages, tuple(s.members.tolist())) for s in stretches}
    assert not ends & {(s.first_page, tuple(s.members.tolist())) for s in stretches}


def test_only_full_pages_are_shared():
    table = np.array([3, 4, 5], np.int32).tobytes()
    (stretch,) = shared_stretches([table, table], [2, 3])
    assert (stretch.first_page, stretch.num_pages) == (0, 2)


def sequence(name, tokens, computed, table, prompt):
    request = Request(name, array("i", tokens[:prompt]), SamplingParams(), None, 0, 0, 100)
    made = Sequence(request)
    made.tokens = array("i", tokens)
    made.computed = computed
    made.table = array("i", table)
    return made


def test_a_mixed_batch_is_laid_out_flat():
    decode = sequence("a", [1, 2, 3, 4, 5, 6], 5, [7, 2], 4)
    chunk = sequence("b", list(range(10, 22)), 3, [5, 6, 1], 12)
    schedule = Schedule([Chunk(decode, 1), Chunk(chunk, 6)])
    batch = build_batch(schedule, 4, torch.device("cpu"))
    assert batch.token_ids.tolist() == [6, 13, 14, 15, 16, 17, 18]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6, 7, 8]
    assert batch.slots.tolist() == [9, 23, 24, 25, 26, 27, 4]
    assert batch.logit_rows.tolist() == [0]  # the chunk does not reach the end of its prompt
    assert batch.sampled == [decode]
    assert batch.plan.query_start.tolist() == [0, 1, 7]
    assert batch.plan.context_len.tolist() == [6, 9]
    assert batch.plan.page_indptr.tolist() == [0, 2, 5]
    assert batch.plan.page_indices.tolist() == [7, 2, 5, 6, 1]
    batch.plan.check(num_pages=8)
