"""The shared stretches of a batch against a naive search, and the layout of a mixed batch."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coppice.kernels.transfer import Outbox
from coppice.runtime.requests.request import LATE, Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner import batch as batch_module
from coppice.runtime.runner.batch import BatchTree, LateTokens, build_batch, shared_stretches
from coppice.runtime.schedule.chunks import Chunk, Schedule


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


def listed(stretches):
    return [(each.first_page, each.num_pages, each.members.tolist()) for each in stretches]


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=7),
    st.lists(st.sampled_from(["grow", "grow", "grow", "swap", "change", "leave", "shrink"])),
    st.randoms(use_true_random=False),
)
def test_remembered_stretches_are_those_that_a_new_search_finds(tables, events, random):
    """After any changes between two steps; a page that a sequence adds is new."""
    sequences = [sequence(str(owner), [1] * 99, 0, table, 9) for owner, table in enumerate(tables)]
    tree, fresh = BatchTree(), 100
    for event in ["grow", *events]:
        each = random.choice(sequences)
        if event == "grow":
            each.table.append(fresh := fresh + 1)
        elif event == "swap":
            random.shuffle(sequences)
        elif event == "change" and each.table:
            each.table[random.randrange(len(each.table))] = random.randrange(3)
        elif event == "leave" and len(sequences) > 1:
            sequences.remove(each)
        elif event == "shrink":
            del each.table[len(each.table) // 2 :]
        given = list(sequences), [each.table.tobytes() for each in sequences]
        full = np.array([len(each.table) for each in sequences], np.int32)
        assert listed(tree.stretches(*given, full)) == listed(shared_stretches(given[1], full))


def test_stretches_of_an_unchanged_batch_are_not_computed_again(monkeypatch):
    calls = []
    find = batch_module.shared_stretches
    monkeypatch.setattr(
        batch_module, "shared_stretches", lambda *given: calls.append(1) or find(*given)
    )
    both = [
        sequence(name, [1] * 20, 16, [7, 8, 9, at, at + 2], 9) for at, name in ((4, "a"), (5, "b"))
    ]
    tree, found = BatchTree(), []
    for step in range(6):
        schedule = Schedule([Chunk(each, 1) for each in both])
        found.append(build_batch(schedule, 4, tree=tree).plan.stretches)
        assert found[-1] is found[0]
        for each in both:
            each.computed += 1
            each.tokens.append(1)
            if each.computed % 4 == 0:
                each.table.append(10 + 2 * step + int(each is both[0]))
    assert len(calls) == 1
    assert listed(found[0]) == [(0, 3, [0, 1])]
    build_batch(Schedule([Chunk(each, 1) for each in reversed(both)]), 4, tree=tree)
    assert len(calls) == 2


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
    batch = build_batch(schedule, 4)
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


def test_a_token_that_is_still_on_the_device_is_taken_there():
    known = sequence("a", [1, 2, 3, 4, 5, 6], 5, [7, 2], 4)
    waits = sequence("b", [1, 2, 3, LATE], 3, [3], 3)
    late = LateTokens(torch.tensor([11, 12, 13]), {known: 0, waits: 2})
    batch = build_batch(Schedule([Chunk(known, 1), Chunk(waits, 1)]), 4, late)
    assert (batch.late_rows.tolist(), batch.late_from.tolist()) == ([1], [2])
    assert batch.send(Outbox(torch.device("cpu")), late).token_ids.tolist() == [6, 13]


def test_padding_is_of_sequences_in_a_page_of_their_own():
    decodes = [sequence("a", [1, 2, 3, 4, 5, 6], 5, [7, 2], 4), sequence("b", [1, 2], 1, [3], 1)]
    batch = build_batch(Schedule([Chunk(each, 1) for each in decodes]), 4)
    assert batch.decodes
    padded = batch.padded(4, 9)
    assert padded.token_ids.tolist() == [6, 2, 0, 0]
    assert padded.positions.tolist() == [5, 1, 0, 0]
    assert padded.slots.tolist() == [9, 13, 36, 36]
    assert padded.plan.context_len.tolist() == [6, 2, 1, 1]
    assert padded.plan.page_indices.tolist() == [7, 2, 3, 9, 9]
    padded.plan.check(num_pages=10)
    with pytest.raises(ValueError, match="page_indices holds 9"):
        padded.plan.check(num_pages=9)
    assert batch.padded(2, 9).slots.tolist() == batch.slots.tolist()
    empty = build_batch(Schedule(), 4).padded(2, 9)
    assert empty.slots.tolist() == [36, 36]
    empty.plan.check(num_pages=10)


def test_a_step_with_prefills_is_no_decoding_step():
    decode = sequence("a", [1, 2, 3, 4, 5, 6], 5, [7, 2], 4)
    prefill = sequence("b", [1, 2, 3], 1, [3], 3)
    assert not build_batch(Schedule([Chunk(decode, 1), Chunk(prefill, 2)]), 4).decodes
    assert not build_batch(Schedule([Chunk(prefill, 1)]), 4).decodes  # not its last token
