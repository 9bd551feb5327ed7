"""The levels that FlashInfer is given read what the plan says, each key once for each row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trees import TREES, tree

from coppice.kernels.attention.interface import AttentionPlan
from coppice.kernels.flashinfer.levels import LevelSchedule, build_levels, choose_levels
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.tiles import choose_tiles

LLAMA = CostModel(choose_tiles(128, 2), group=4, kv_heads=8, head_dim=128, key_bytes=512)
#: Everything is shared that can be.
EAGER = replace(LLAMA, key_bytes=10**9, launch_bytes=0)


def expected_slots(plan: AttentionPlan, window: int | None) -> list[list[int]]:
    """The flat slots of the keys that each row sees, sorted, by the interface's definition."""
    rows = []
    for i in range(plan.num_sequences):
        table = plan.page_indices[plan.page_indptr[i] : plan.page_indptr[i + 1]]
        context, count = int(plan.context_len[i]), int(np.diff(plan.query_start)[i])
        for position in range(context - count, context):
            low = 0 if window is None else max(0, position - window + 1)
            at = np.arange(low, position + 1)
            slots = table[at // plan.page_size] * plan.page_size + at % plan.page_size
            rows.append(sorted(slots.tolist()))
    return rows


def read_slots(plan: AttentionPlan, schedule: LevelSchedule, window: int | None) -> list[list[int]]:
    """The same as FlashInfer reads the levels: rows of a group over its pages, masks by places."""
    size = plan.page_size
    rows: list[list[int]] = [[] for _ in range(plan.num_rows)]
    for level in schedule.levels:
        assert level.query_indptr[0] == level.page_indptr[0] == 0
        assert (np.diff(level.query_indptr) > 0).all() and (np.diff(level.page_indptr) >= 0).all()
        page_ids = level.page_ids(plan.page_indices)
        assert level.page_indptr[-1] == level.num_pages == len(page_ids)
        for group, length in enumerate(level.kv_len.tolist()):
            pages = page_ids[level.page_indptr[group] : level.page_indptr[group + 1]]
            last = int(level.last_page_len[group])
            assert length == max(len(pages) - 1, 0) * size + last
            assert 1 <= last <= size if len(pages) else last == 0
            first, stop = level.query_indptr[group : group + 2].tolist()
            for number in range(first, stop):
                place = length - (stop - number) if level.causal else length - 1
                at = np.arange(place + 1)
                if window is not None:
                    # The mask is FlashInfer's own, also where it must not hide anything.
                    at = at[at + window - 1 >= length - (stop - number)]
                slots = pages[at // size] * size + at % size
                rows[level.first_row + number] += slots.tolist()
    order = np.arange(plan.num_rows) if schedule.rows is None else schedule.rows
    found: list[list[int]] = [[] for _ in order]
    for place, row in enumerate(order):
        found[row] = sorted(rows[place])
    return found


def assert_reads(plan: AttentionPlan, schedule: LevelSchedule, window: int | None) -> None:
    assert read_slots(plan, schedule, window) == expected_slots(plan, window)
    places = np.arange(plan.num_rows) if schedule.rows is None else np.sort(schedule.rows)
    assert np.array_equal(places, np.arange(plan.num_rows))
    counts = np.diff(plan.query_start)
    for level, decoding in ((schedule.decode, True), (schedule.prefill, False)):
        chosen = counts[(counts == 1) == decoding]
        assert (level is None) == (len(chosen) == 0)
        assert level is None or level.num_rows == chosen.sum()
    for level in schedule.shared:
        assert level.kv_len[0] and level.kv_len[-1] and not level.causal


@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tree", TREES)
def test_each_key_once(make_batch, tree, page_size, window):
    plan = make_batch(*TREES[tree], page_size=page_size).plan
    shared = choose_levels(plan, window, EAGER)
    if window is None:
        assert sum(map(len, shared)) == len(plan.stretches)
    assert_reads(plan, build_levels(plan, window, shared), window)
    assert_reads(plan, build_levels(plan, window), window)


def test_each_key_once_in_random_trees(make_batch):
    rng = np.random.default_rng(0)
    shared = 0
    for seed in range(80):
        count = int(rng.integers(2, 9))
        tails = [(int(rng.integers(1, 4)), int(rng.integers(0, 20))) for _ in range(count)]
        stretches, groups = [], [[int(i) for i in rng.permutation(count)]]
        for _ in range(4):
            below = []
            for members in groups:
                if len(members) > 1:
                    if pages := int(rng.integers(0, 6)):
                        stretches.append((sorted(members), pages))
                    at = int(rng.integers(0, len(members)))
                    below += [members[:at], members[at:]]
            groups = below
        batch = make_batch(tails, stretches, page_size=int(rng.choice([1, 4, 5])), seed=seed)
        window = int(rng.integers(1, 60)) if seed % 3 == 0 else None
        # Which stretches pay differs from case to case: what is not shared stays private.
        model = replace(EAGER, key_bytes=int(rng.choice([10, 500, 10**9])))
        levels = choose_levels(batch.plan, window, model)
        assert_reads(batch.plan, build_levels(batch.plan, window, levels), window)
        shared += len(levels)
    assert shared > 60


def test_groups_lie_side_by_side_and_decoding_comes_first(make_batch):
    plan = make_batch(*TREES["interleaved"]).plan
    schedule = build_levels(plan, None, choose_levels(plan, None, EAGER))
    assert schedule.rows.tolist() == [0, 4, 2, 1, 5, 3]
    first, second = schedule.shared
    assert (first.query_indptr.tolist(), first.kv_len.tolist()) == ([0, 3, 5], [12, 8])
    assert (second.first_row, second.query_indptr.tolist()) == (0, [0, 2])
    plan = make_batch(*TREES["mixed"]).plan
    schedule = build_levels(plan, None, choose_levels(plan, None, EAGER))
    rows = np.diff(plan.query_start)
    assert schedule.decode.num_rows == 3
    assert np.array_equal(np.diff(schedule.prefill.query_indptr), rows[rows > 1])
    assert schedule.shared[0].query_indptr.tolist() == [0, plan.num_rows]


def test_a_batch_in_depth_first_order_is_left_as_it_is(make_batch):
    """Decoding sequences and chunks below one stretch, each beside sequences that share nothing."""
    tails = [(1, 2), (1, 0), (1, 5), (4, 1), (2, 0), (3, 3), (5, 2)]
    plan = make_batch(tails, [([0, 1, 4, 5], 3), ([1, 4], 2)]).plan
    shared = choose_levels(plan, None, EAGER)
    schedule = build_levels(plan, None, shared)
    assert schedule.rows is None
    assert_reads(plan, schedule, None)
    first, second = schedule.shared
    assert first.query_indptr.tolist() == [0, 2, 7, 12] and first.kv_len.tolist() == [12, 0, 12]
    assert (second.first_row, second.kv_len.tolist()) == (1, [8, 0, 8])


def test_groups_without_pages_fill_gaps(make_batch):
    plan = make_batch(*TREES["gaps"]).plan
    schedule = build_levels(plan, None, choose_levels(plan, None, EAGER))
    assert schedule.rows is None
    (level,) = schedule.shared
    assert level.query_indptr.tolist() == [0, 2, 4, 6]
    assert level.page_indptr.tolist() == [0, 3, 3, 5]
    assert level.last_page_len.tolist() == [4, 0, 4]


def test_three_levels_of_a_llama():
    """2k of system prompt, 8 documents of 8k, 8 questions each."""
    documents = [(range(8 * i, 8 * i + 8), 8192) for i in range(8)]
    plan = tree([(range(64), 2048), *documents], 256, 64)
    schedule = build_levels(plan, None, choose_levels(plan, None, LLAMA))
    assert schedule.rows is None
    system, document = schedule.shared
    assert (system.query_indptr.tolist(), system.kv_len.tolist()) == ([0, 64], [2048])
    assert document.query_indptr.tolist() == list(range(0, 65, 8))
    assert document.kv_len.tolist() == [8192] * 8
    assert (schedule.decode.kv_len == 256).all() and schedule.prefill is None


def test_a_level_that_does_not_pay_for_its_launches_is_left_out():
    """Two of 64 sequences share another page: its keys stay with both."""
    plan = tree([(range(64), 8192), (range(2), 64)], 256, 64)
    assert [len(level) for level in choose_levels(plan, None, LLAMA)] == [1]
    assert [len(level) for level in choose_levels(plan, None, EAGER)] == [1, 1]
    schedule = build_levels(plan, None, choose_levels(plan, None, LLAMA))
    assert schedule.decode.kv_len.tolist() == [320, 320, *[256] * 62]


@pytest.mark.parametrize("batch", [2, 3])
def test_small_groups_share_long_stretches_and_leave_short_ones(batch):
    assert choose_levels(tree([(range(batch), 131072)], 64, batch), None, LLAMA)
    assert not choose_levels(tree([(range(batch), 16)], 64, batch), None, LLAMA)


def test_with_a_window_those_share_that_see_everything():
    plan = tree([(range(64), 4096), (range(32), 4096)], 64, 64)
    (level,) = choose_levels(plan, 5000, LLAMA)
    assert [(each.begin, each.end, each.members.tolist()) for each in level] == [
        (0, 4096, list(range(32, 64)))
    ]
    schedule = build_levels(plan, 5000, (level,))
    # The others start with the page in which their window begins.
    assert schedule.decode.kv_len.tolist() == [5008] * 32 + [64] * 32
    assert_reads(plan, schedule, 5000)
    assert not choose_levels(plan, 100, LLAMA)
