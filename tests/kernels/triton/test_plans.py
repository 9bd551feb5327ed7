"""Plans in fixed places, which graphs read: each attends as a prepared one does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice.kernels.attention.interface import AttentionPlan, SharedStretch
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.backends import select_backend
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.items import build_tree_schedule
from coppice.kernels.schedule.tiles import choose_tiles
from coppice.kernels.transfer import Landing
from coppice.kernels.triton import backend as triton_backend_module
from coppice.kernels.triton import plans as triton_plans

SIZE = 6
# Decoding sequences: private, below two levels, two below one stretch, and of one token each.
STEPS = [
    ([(1, 9), (1, 0), (1, 30), (1, 3), (1, 12), (1, 1)], []),
    ([(1, 2), (1, 5), (1, 7), (1, 0), (1, 1), (1, 21)], [(range(6), 7), ([0, 2, 3, 5], 2)]),
    ([(1, 0)] * SIZE, [([1, 4], 9)]),
    ([(1, 0)] * SIZE, []),
]


@pytest.fixture(params=[False, True], ids=["tree", "deterministic"])
def backend(request, triton_backend):
    made = select_backend("triton", triton_backend.device, deterministic=request.param)
    if made.device.type == "cpu":
        made._multiprocessors = 2  # the interpreter takes its time even for programs without work
    return made


def fixed_plan(backend, num_pages, sizes=(SIZE,), max_pages=64):
    return backend.fixed_plans(sizes, page_size=4, num_pages=num_pages, max_pages=max_pages)[0][0]


# With 8 query heads a KV head, more than two rows are a wide item; 20 are worked in two parts.
@pytest.mark.parametrize(
    ("window", "group"),
    [(9, 2), *(pytest.param(None, group, marks=pytest.mark.slow) for group in (8, 20))],
)
def test_one_step_after_the_other_is_the_reference(
    make_batch, backend, fine_splits, size, window, group
):
    batches = [
        make_batch(
            [(rows, cached * size) for rows, cached in tails], levels, seed=seed, group=group
        )
        for seed, (tails, levels) in enumerate(STEPS)
    ]
    fixed = fixed_plan(backend, max(each.num_pages for each in batches), max_pages=64 * size)
    places = set()
    for batch in [*batches, batches[1], batches[0]]:
        assert fixed.load(batch.plan)
        for got, expected in zip(
            batch.run(backend, window, prepared=fixed),
            batch.run(ReferenceBackend(), window),
            strict=True,
        ):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        model = backend.cost_model(2 * group, 2, 16, torch.float32, torch.float32)
        sent = fixed.schedule(window, model)
        assert len(sent.launches) == (2 if group >= 8 and not backend.deterministic else 1)
        arrays = [sent.rows, sent.slots, sent.positions, sent.merges, sent.page_indices]
        arrays += [each for _, _, *both in sent.launches for each in both]
        places.add(tuple((each.data_ptr(), tuple(each.shape)) for each in arrays))
    assert len(places) == 1, "an array has moved or changed its length"


@pytest.mark.parametrize("group", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_mixed_steps_take_the_places_of_decoding_ones(
    make_batch, backend, fine_splits, size, group
):
    """Chunks of prompts beside decoding sequences, in as many rows as a graph has."""
    mixed = [
        ([(4, 9), (1, 3), (1, 12)], []),
        STEPS[1],
        ([(3, 2), (1, 0), (2, 5)], [(range(3), 7)]),
        ([(SIZE, 30)], []),
        ([(SIZE, 0)], []),
    ]
    batches = [
        make_batch(
            [(rows, cached * size) for rows, cached in tails], levels, seed=seed, group=group
        )
        for seed, (tails, levels) in enumerate(mixed)
    ]
    fixed = fixed_plan(backend, max(each.num_pages for each in batches), max_pages=64 * size)
    loaded = 0
    for batch in [batches[1], *batches]:
        if not fixed.load(batch.plan):
            assert backend.deterministic, "only its fixed parts may need more room"
            continue
        loaded += 1
        for got, expected in zip(
            batch.run(backend, prepared=fixed), batch.run(ReferenceBackend()), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert loaded > 3


def test_a_graph_launches_what_the_chip_holds(make_batch, backend, fine_splits, monkeypatch):
    """Its few programs take all items that a step has, and end at the first that it lacks.

    So do those of the merge with rows and heads.
    """
    grids, merging = [], []

    class Recorded:
        def __init__(self, kernel, grids):
            self.kernel, self.grids = kernel, grids

        def __getitem__(self, grid):
            self.grids.append(grid[0])
            return self.kernel[grid]

    for kernel, kept in (("attend_items", grids), ("merge_partials", merging)):
        recorded = Recorded(getattr(triton_backend_module, kernel), kept)
        monkeypatch.setattr(triton_backend_module, kernel, recorded)
    monkeypatch.setattr(triton_backend_module, "_MERGING", 3)
    monkeypatch.setattr(backend, "_multiprocessors", 1)
    batch = make_batch(*STEPS[1], seed=1)
    fixed = fixed_plan(backend, batch.num_pages)
    assert fixed.load(batch.plan)
    found = batch.run(backend, prepared=fixed)
    model = backend.cost_model(4, 2, 16, torch.float32, torch.float32)
    launches = fixed.schedule(None, model).launches
    rooms = [(tile.resident, len(items)) for tile, _, items, _ in launches]
    assert grids == [min(resident, room * model.programs) for resident, room in rooms]
    assert max(grids) < sum(int(count[0]) for *_, count in launches) * model.programs
    merged = int(fixed.schedule(None, model).num_merges[0]) * 4
    assert merging == [3] and (backend.deterministic or merged > 3)
    for got, expected in zip(found, batch.run(ReferenceBackend()), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_layers_of_two_kinds_are_loaded_together(make_batch, backend):
    first, second = (make_batch(STEPS[at][0], STEPS[at][1], seed=at) for at in (0, 1))
    fixed = fixed_plan(backend, 100)
    assert fixed.load(first.plan)
    for window in (None, 5):  # as in a captured pass, which learns the kinds
        first.run(backend, window, prepared=fixed)
    assert fixed.load(second.plan)
    for window in (None, 5):
        got, _ = second.run(backend, window, prepared=fixed)
        expected, _ = second.run(ReferenceBackend(), window)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_plans_of_all_sizes_share_their_memory(make_batch, backend):
    made = backend.fixed_plans((SIZE, 2), page_size=4, num_pages=100, max_pages=64)
    plans = [plan for (plan,) in made]
    pair = make_batch([(1, 5), (1, 8)])
    for fixed, batch in ((plans[0], make_batch(*STEPS[0])), (plans[1], pair)):
        assert fixed.load(batch.plan)
        batch.run(backend, prepared=fixed)
    model = backend.cost_model(4, 2, 16, torch.float32, torch.float32)
    sent = [fixed.schedule(None, model) for fixed in plans]
    first, second = (each.launches[0][2].untyped_storage() for each in sent)
    assert first.data_ptr() == second.data_ptr()
    # Two rows are never wide: their graph has one launch less.
    assert len(sent[1].launches) == 1


def test_what_does_not_fit_is_not_loaded(make_batch, backend, monkeypatch):
    monkeypatch.setattr(triton_plans, "_MOST_PAGES", 30)
    fixed = fixed_plan(backend, 100)
    small, large = make_batch([(1, 3)] * SIZE), make_batch([(1, 30)] * SIZE)
    assert fixed.load(small.plan)
    small.run(backend, prepared=fixed)
    assert not fixed.load(large.plan)
    assert fixed.load(small.plan)
    got, _ = small.run(backend, prepared=fixed)
    torch.testing.assert_close(got, small.run(ReferenceBackend())[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("limit", ["_PARTS", "_WAVES"])
def test_too_many_pieces_are_split_again(
    make_batch, triton_backend, fine_splits, monkeypatch, size, limit
):
    """A row of a wide range more than there is room for, and an item."""
    monkeypatch.setattr(triton_plans, "_PARTS", 1 if limit == "_PARTS" else 100)
    monkeypatch.setattr(triton_plans, "_WAVES", 0 if limit == "_WAVES" else 100)
    monkeypatch.setattr(triton_plans, "_MORE_PARTS", 0)
    fixed = fixed_plan(triton_backend, 10**4, max_pages=10**4)
    small, large = make_batch([(1, 1)] * SIZE), make_batch([(1, 90 * size)] + [(1, 1)] * 5)
    assert fixed.load(small.plan)
    small.run(triton_backend, prepared=fixed)
    for batch in (large, small):
        assert fixed.load(batch.plan)
        got, _ = batch.run(triton_backend, prepared=fixed)
        torch.testing.assert_close(got, batch.run(ReferenceBackend())[0], rtol=2e-5, atol=2e-5)


LLAMA = CostModel(choose_tiles(128, 2, 4), 4, 8, 128, 512, 132)
HEADS = {
    "32 heads of 128, 8 KV": LLAMA,
    "16 heads of 128, 8 KV": CostModel(choose_tiles(128, 2, 2), 2, 8, 128, 512, 132),
    "in 8 bits": replace(LLAMA, key_bytes=256),
    "one KV head": CostModel(choose_tiles(128, 2, 32), 32, 1, 128, 512, 132),
    "48 heads of a KV head": CostModel(choose_tiles(128, 2, 48), 48, 2, 128, 512, 132),
    "H200 or other": replace(LLAMA, multiprocessors=78),
}


def decode_plan(lengths, levels=(), page_size=16):
    """One row a sequence; ``levels`` are (members, pages) that these have in common at first."""
    tables, stretches, used = [[] for _ in lengths], [], 0
    for members, pages in levels:
        first = len(tables[members[0]])
        stretches.append(SharedStretch(first, pages, np.array(members, np.int32)))
        for member in members:
            tables[member] += range(used, used + pages)
        used += pages
    for table, length in zip(tables, lengths, strict=True):
        more = -(-length // page_size) - len(table)
        table += range(used, used + more)
        used += more
    return AttentionPlan(
        page_size=page_size,
        query_start=np.arange(len(lengths) + 1, dtype=np.int32),
        context_len=np.array(lengths, np.int32),
        page_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        page_indices=np.concatenate(tables).astype(np.int32),
        stretches=tuple(stretches),
    )


def planned(size, model, largest=None, window=None, max_pages=8192):
    """The plan of a graph of ``size`` rows, as if its first pass had been captured."""
    fixed, *_ = triton_plans.fixed_plans(
        (size, largest or size), device=torch.device("cpu"), page_size=16, num_pages=2**22,
        max_pages=max_pages, deterministic=False,
    )[0]  # fmt: skip
    assert fixed.load(decode_plan([1] * size))
    fixed.schedule(window, model)
    return fixed


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("rows", "tokens"),
    [(16, 2**14), (32, 2**13), (64, 2**15), (256, 2**13), (1, 2**17), (5, 10**5)],
)
def test_long_contexts_have_room_in_a_graph(heads, rows, tokens):
    """Private, below a shared stretch, below two levels, and unequal: none runs without a graph."""
    fixed = planned(rows, HEADS[heads])
    shared = [(range(rows), tokens // 32)] if rows > 1 else []
    groups = [(range(at, min(at + 8, rows)), tokens // 64) for at in range(0, rows - 1, 8)]
    unequal = [1 + tokens * each // rows for each in range(rows)]
    for plan in (
        decode_plan([tokens] * rows),
        decode_plan([tokens] * rows, shared),
        decode_plan([tokens] * rows, [*shared, *(each for each in groups if len(each[0]) > 1)]),
        decode_plan(unequal),
    ):
        assert fixed.load(plan)


@pytest.mark.parametrize("heads", HEADS)
def test_any_tree_of_decoding_sequences_has_room(heads):
    """Trees of any depth: every key of a row is walked once, by items that have room."""
    rng = np.random.default_rng(5)
    for rows in (2, 9, 40, 130):
        model = HEADS[heads]
        window = 700 if rows == 9 else None
        fixed = planned(rows, model, window=window)
        _, _, limits = fixed._kinds[window, model]
        for _ in range(6):
            levels, groups = [], [np.arange(rows)]
            while groups:
                members = groups.pop(0)
                levels.append((members.tolist(), int(rng.integers(1, 200))))
                cuts = np.sort(rng.choice(len(members) + 1, 2))
                groups += [each for each in np.split(members, cuts) if 1 < len(each) < len(members)]
            depth = np.zeros(rows, int)
            for members, pages in levels:
                depth[members] += pages * 16
            lengths = (depth + rng.integers(1, 3000, rows)).tolist()
            plan = decode_plan(lengths, levels)
            assert fixed.load(plan)
            made = build_tree_schedule(plan, window, replace(model, launch_bytes=0), limits=limits)
            assert made.fits(limits)
            walked = np.zeros(rows, np.int64)
            for launch in made.launches:
                for first, count, _, begin, end, *_ in launch.items.tolist():
                    walked[made.rows[first : first + count]] += end - begin
            if window is None:
                assert walked.tolist() == lengths


def test_what_has_no_room_as_a_tree_is_planned_without_it(monkeypatch):
    """There is always room for one item a sequence."""
    monkeypatch.setattr(triton_plans, "_WAVES", 0)
    monkeypatch.setattr(triton_plans, "_PARTS", 1)
    monkeypatch.setattr(triton_plans, "_MORE_PARTS", 0)
    fixed = planned(64, LLAMA)
    levels = [(range(64), 64), *((range(at, at + 8), 64) for at in range(0, 64, 8))]
    assert fixed.load(decode_plan([4096] * 64, levels))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"rows": [(1, 3)] * 5}, "query_start of the plan is of 5; here it must be of 6"),
        ({"rows": [(2, 3)] + [(1, 3)] * 5}, "query_start of the plan is of 7; .* 6"),
        ({"page_size": 8}, "page_size of the plan is of 8; here it must be of 4"),
        ({"num_pages": 3}, "and below 3, the pages of the cache"),
    ],
)
def test_other_plans_are_refused(make_batch, backend, changes, refusal):
    batch = make_batch(changes.get("rows", [(1, 3)] * SIZE), page_size=changes.get("page_size", 4))
    fixed = fixed_plan(backend, changes.get("num_pages", 100))
    with pytest.raises(ValueError, match=refusal):
        fixed.load(batch.plan)


def test_a_landing_is_filled_in_part_by_one_transfer():
    arrays = [((3, 2), np.int32), ((5,), np.int64), ((4,), np.int32)]
    memory = torch.full((Landing.size(arrays),), 7, dtype=torch.uint8)
    landing = Landing(arrays, memory)
    first, second, last = landing.arrays
    assert (first.shape, second.dtype, last.shape) == ((3, 2), torch.int64, (4,))
    assert landing.put([np.ones((2, 2), np.int32), np.arange(5), np.ones(1, np.int32)])
    assert first.tolist() == [[1, 1], [1, 1], [0x07070707] * 2]
    assert second.tolist() == [0, 1, 2, 3, 4]
    assert last[0] == 1 and (last[1:] == 0x07070707).all()
    assert not landing.put([np.ones((4, 2), np.int32), np.arange(5), np.ones(1, np.int32)])
    assert first.tolist() == [[1, 1], [1, 1], [0x07070707] * 2]
    assert [array.data_ptr() % 16 for array in landing.arrays] == [memory.data_ptr() % 16] * 3


def test_backends_without_graphs_have_no_fixed_plans():
    backend = ReferenceBackend()
    assert backend.fixed_plans([1], page_size=4, num_pages=8, max_pages=2) is None
