"""Work items cover every key of every row once; sharing is chosen by bytes, never against them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from trees import LEVELS, MIXED, tree

from coppice.kernels.attention.interface import AttentionPlan
from coppice.kernels.schedule import cost
from coppice.kernels.schedule import items as tree_schedule
from coppice.kernels.schedule.cost import CostModel, choose_shared, least_cost
from coppice.kernels.schedule.cpu import build_cpu_schedule, cpu_cost_model
from coppice.kernels.schedule.items import TreeSchedule, build_tree_schedule, row_positions
from coppice.kernels.schedule.tiles import Tile, Tiles, choose_tiles, head_blocks

#: Llama 3 8B: 32 query heads, 8 KV heads of 128, bfloat16.
LLAMA = CostModel(choose_tiles(128, 2), 4, 8, 128, 512)
#: Tiles so small that small batches are cut in every way.
SMALL = CostModel(Tiles(Tile(4, 4, 4, 2, 1), Tile(12, 8, 4, 2, 1)), 2, 2, 16, 128, 4, 0)


def assert_covers(plan: AttentionPlan, schedule: TreeSchedule, window: int | None) -> None:
    """By brute force: each row reads the slots that it may see, each once, by its items."""
    positions = row_positions(plan)
    read_slots: list[list[int]] = [[] for _ in range(plan.num_rows)]
    places: list[list[tuple[int, int]]] = [[] for _ in range(plan.num_rows)]
    for launch in schedule.launches:
        keys = launch.tile.keys
        for first, count, table, begin, end, clear, unclear, slot in launch.items.tolist():
            assert 0 < count <= launch.tile.queries
            assert begin < end
            assert clear % keys == unclear % keys == 0
            assert begin // keys * keys <= clear <= unclear <= max(end, clear)
            for place, row in enumerate(schedule.rows[first : first + count].tolist()):
                position = int(positions[row])
                low = 0 if window is None else max(0, position - window + 1)
                if clear < unclear:
                    assert max(low, begin) <= clear
                    assert unclear <= min(position + 1, end)
                for t in range(max(begin, low), min(end, position + 1)):
                    page = int(plan.page_indices[table + t // plan.page_size])
                    read_slots[row].append(page * plan.page_size + t % plan.page_size)
                if len(schedule.slots):
                    places[row].append((begin, int(schedule.slots[slot + place])))
                else:
                    places[row].append((begin, -1))
    merges = {row: (first, count) for row, first, count in schedule.merges.tolist()}
    for i in range(plan.num_sequences):
        table = plan.page_indices[plan.page_indptr[i] : plan.page_indptr[i + 1]]
        for row in range(int(plan.query_start[i]), int(plan.query_start[i + 1])):
            position = int(positions[row])
            low = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(low, position + 1)
            slots = table[seen // plan.page_size] * plan.page_size + seen % plan.page_size
            assert sorted(read_slots[row]) == sorted(slots.tolist())
            if row in merges:
                first, count = merges[row]
                assert [slot for _, slot in sorted(places[row])] == [*range(first, first + count)]
            else:
                assert [slot for _, slot in places[row]] == [-1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6, 30])
@pytest.mark.parametrize("splits", [(), (4, 8, 16)], ids=["whole", "split"])
@pytest.mark.parametrize("row_bytes", [0, 1], ids=["share all", "share what pays"])
def test_every_key_once(make_batch, monkeypatch, window, splits, row_bytes, deterministic):
    monkeypatch.setattr(cost, "SPLITS", splits)
    monkeypatch.setattr(CostModel, "start_keys", 0)
    monkeypatch.setattr(tree_schedule, "DETERMINISTIC_SPLIT", 16)
    if not row_bytes:
        monkeypatch.setattr(CostModel, "row_bytes", 0)
    for stretches in ((), LEVELS, LEVELS[1:3]):
        plan = make_batch(MIXED, stretches).plan
        schedule = build_tree_schedule(plan, window, SMALL, deterministic=deterministic)
        assert_covers(plan, schedule, window)


def test_every_key_once_in_random_trees(make_batch, monkeypatch):
    monkeypatch.setattr(cost, "SPLITS", (4, 8))
    monkeypatch.setattr(CostModel, "start_keys", 1)
    rng = np.random.default_rng(0)
    shared = known = 0
    for seed in range(60):
        count = int(rng.integers(2, 7))
        most = 9 if seed % 3 else 2  # in every third one all decode
        tails = [(int(rng.integers(1, most)), int(rng.integers(0, 20))) for _ in range(count)]
        stretches, groups = [], [list(range(count))]
        for _ in range(3):
            below = []
            for members in groups:
                if len(members) > 1:
                    if pages := int(rng.integers(0, 12)):
                        stretches.append((members, pages))
                    at = int(rng.integers(0, len(members)))
                    below += [members[:at], members[at:]]
            groups = below
        batch = make_batch(tails, stretches, page_size=int(rng.choice([1, 4, 5])), seed=seed)
        window = None if seed % 2 else int(rng.integers(1, 60))
        schedule = build_tree_schedule(batch.plan, window, SMALL)
        assert_covers(batch.plan, schedule, window)
        plain = build_tree_schedule(replace(batch.plan, stretches=()), window, SMALL)
        assert schedule.cost <= plain.cost
        least = least_cost(batch.plan, window, SMALL)
        assert least <= plain.cost
        known += least > 0
        shared += bool(schedule.shared)
    assert shared > 10
    assert known > 5


def read(plan: AttentionPlan, model: CostModel = LLAMA) -> tuple[int, int, TreeSchedule]:
    """Tokens read for each KV head, without sharing and with it."""
    made = build_tree_schedule(plan, None, model)
    plain = build_tree_schedule(replace(plan, stretches=()), None, model)
    return plain.keys_read, made.keys_read, made


def test_bytes_of_many_questions_about_one_document():
    """64 sequences under 8k shared and 256 own tokens: 256 packed queries are two tiles."""
    plain, tree_read, made = read(tree([(range(64), 8192)], 256, 64))
    assert plain == 64 * (8192 + 256)
    assert tree_read == 2 * 8192 + 64 * 256
    assert plain / tree_read > 16
    assert [(s.begin, s.end, len(s.members)) for s in made.shared] == [(0, 8192, 64)]


def test_bytes_of_three_levels():
    """2k of system prompt, 8 documents of 8k, 8 questions each: 32 packed queries a document."""
    documents = [(range(8 * i, 8 * i + 8), 8192) for i in range(8)]
    plain, tree_read, made = read(tree([(range(64), 2048), *documents], 256, 64))
    assert plain == 64 * (2048 + 8192 + 256)
    assert tree_read == 2 * 2048 + 8 * 8192 + 64 * 256
    assert len(made.shared) == 9


def test_bytes_of_a_beam():
    """8 beams at 4k: one stretch for all of them."""
    plain, tree_read, _ = read(tree([(range(8), 4096)], 16, 8))
    assert plain == 8 * (4096 + 16)
    assert tree_read == 4096 + 8 * 16


@pytest.mark.parametrize("batch", [2, 3])
def test_small_groups_share_long_stretches_and_leave_short_ones(batch):
    for model in (LLAMA, replace(LLAMA, group=8), replace(LLAMA, group=1)):
        _, _, made = read(tree([(range(batch), 131072)], 64, batch), model)
        assert made.shared
        _, _, made = read(tree([(range(batch), 16)], 64, batch), model)
        assert not made.shared


def test_nothing_to_gain_is_plain_decode():
    """Stretches that do not pay leave the very items of a batch without any."""
    plan = tree([(range(64), 32)], 2000, 64)
    made = build_tree_schedule(plan, None, LLAMA)
    plain = build_tree_schedule(replace(plan, stretches=()), None, LLAMA)
    assert made.cost == plain.cost
    for ours, theirs in zip(made.launches, plain.launches, strict=True):
        assert np.array_equal(ours.items, theirs.items)


def test_a_stretch_too_short_is_read_with_its_children():
    """Two groups below a stretch of one page: each reads that page along with its own stretch."""
    plan = tree([(range(4), 16), (range(2), 4096), (range(2, 4), 4096)], 64, 4)
    chosen = choose_shared(plan, None, replace(LLAMA, launch_bytes=0))
    assert [(s.begin, s.end, s.members.tolist()) for s in chosen] == [
        (0, 4112, [0, 1]),
        (0, 4112, [2, 3]),
    ]


def test_one_long_sequence_fills_the_chip():
    plan = tree([], 32768, 1)
    made = build_tree_schedule(plan, None, LLAMA)
    programs = sum(len(launch.items) for launch in made.launches) * LLAMA.kv_heads
    assert programs >= LLAMA.multiprocessors


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_thread_has_as_many_of_the_long_tasks(threads):
    """Of a stretch's rows, each KV head's a task, and of the sequences' own keys."""
    model = cpu_cost_model(9, 3, 64, lanes=16, most_lanes=64, keys=48, threads=threads)
    made = build_cpu_schedule(tree([(range(32), 1024)], 80, 32), None, model)
    shared = made.items[made.tasks[:, 0], 1] > 1
    assert shared.sum() == 6 and (~shared).sum() == 32
    cuts = made.shares
    assert len(cuts) == threads + 1 and cuts[0] == 0 and cuts[-1] == 38
    assert sorted(map(tuple, made.tasks.tolist())) == sorted(
        [(item, head, head + 1) for item in (32, 33) for head in range(3)]
        + [(item, 0, 3) for item in range(32)]
    )
    long = [int(shared[i:j].sum()) for i, j in pairwise(cuts)]
    assert max(long) - min(long) <= 1
    if 6 % threads == 0:
        each = [int((~shared)[i:j].sum()) for i, j in pairwise(cuts)]
        assert max(each) - min(each) <= 1


def test_threads_share_one_sequence_by_its_keys_where_heads_are_worked_together():
    """Divided by its eight KV heads, every thread would read a part of each token."""
    model = cpu_cost_model(16, 8, 128, lanes=16, most_lanes=64, keys=48, threads=2)
    made = build_cpu_schedule(tree([], 8192, 1), None, model)
    assert made.tasks.tolist() == [[0, 0, 8], [1, 0, 8]]
    assert made.shares.tolist() == [0, 1, 2]
    first, second = made.items[:, 4] - made.items[:, 3]
    assert first + second == 8192 and abs(first - second) <= 2 * 48


@pytest.mark.parametrize(("tokens", "shared"), [(64, False), (1024, True)])
def test_a_cpu_shares_a_stretch_where_that_saves_more_than_memory(tokens, shared):
    """Seven query heads of a KV head: many such rows compute as long together as one by one."""
    model = cpu_cost_model(14, 2, 64, lanes=16, most_lanes=64, keys=48, threads=2)
    made = build_cpu_schedule(tree([(range(32), tokens)], 64, 32), None, model)
    assert bool(made.tree.shared) is shared


def test_prefill_is_not_split_where_it_fills_the_chip():
    plan = tree([], 8192, 1, rows=8192)
    made = build_tree_schedule(plan, None, LLAMA)
    assert len(made.merges) == 0
    lengths = made.launches[0].items[:, 4] - made.launches[0].items[:, 3]
    assert (np.diff(lengths) <= 0).all(), "the longest first"


@pytest.mark.parametrize(
    ("head_dim", "itemsize", "group", "parts", "packed", "few_rows", "many_rows"),
    [
        (128, 2, 4, 1, 4, 4, 32),
        (64, 2, 32, 1, 32, 1, 4),
        (64, 2, 71, 2, 36, 1, 3),
        (256, 2, 71, 2, 36, 1, 1),
        (128, 2, 200, 4, 50, 1, 2),
        (64, 4, 71, 5, 15, 1, 2),
    ],
)
def test_many_heads_of_a_kv_head_fit_the_tile_or_are_cut(
    head_dim, itemsize, group, parts, packed, few_rows, many_rows
):
    model = CostModel(
        choose_tiles(head_dim, itemsize, group), group, 1, head_dim, 2 * head_dim * itemsize
    )
    assert (model.parts, model.packed) == (parts, packed)
    assert (model.few_rows, model.many_rows) == (few_rows, many_rows)
    assert model.programs == parts and model.parts * model.packed >= group
    plan = tree([(range(6), 4096)], 100, 6)
    assert_covers(plan, build_tree_schedule(plan, None, model), None)


def test_a_stretch_before_the_window_of_some_members(make_batch):
    """Members that do not see all of a stretch read it apart; those below it may still share."""
    tails = [(1, 0), (1, 0), (1, 0), (1, 90)]
    plan = make_batch(tails, [(range(4), 4), ([0, 1, 2], 12), ([0, 1], 3)]).plan
    for window in (40, 70, 75, 77, 90):
        schedule = build_tree_schedule(plan, window, replace(SMALL, launch_bytes=0))
        assert_covers(plan, schedule, window)
    shared = choose_shared(plan, 70, replace(SMALL, tiles=choose_tiles(16, 4)))
    assert [(each.begin, each.end, each.members.tolist()) for each in shared] == [
        (16, 64, [0, 1, 2]),
        (64, 76, [0, 1]),
    ]


@pytest.mark.parametrize(
    ("head_dim", "blocks"),
    [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (112, (128, 0)), (128, (128, 0)),
     (192, (128, 64)), (20, (32, 0)), (40, (32, 16)), (8, (16, 0)), (256, (256, 0))],
)  # fmt: skip
def test_heads_are_multiplied_in_few_blocks(head_dim, blocks):
    assert head_blocks(head_dim, 128) == blocks
    whole, none = head_blocks(head_dim, 16)
    assert none == 0 and whole >= head_dim and sum(blocks) >= head_dim
    assert head_blocks(head_dim, 128, eight_bits=True) == (whole, 0)
