"""Plans of FlashInfer's wrappers in fixed places, as a graph replays them, step after step."""

from __future__ import annotations

import sys

import pytest
import torch
from fake_flashinfer import Library, share_all

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.flashinfer import fixed as fixed_plans
from coppice.kernels.flashinfer.backend import FlashInferBackend
from coppice.kernels.flashinfer.fixed import (
    LEVELS,
    FixedMemory,
    FlashInferFixedPlan,
    num_groups,
)
from coppice.kernels.flashinfer.wrappers import LayerKind
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.tiles import choose_tiles
from coppice.kernels.triton import plans as triton_plans
from coppice.kernels.triton.plans import TritonFixedPlan

SIZE = 8
TAILS = [(1, 3), (1, 0), (1, 5), (1, 2), (1, 9), (1, 1), (1, 12), (1, 4)]
#: Steps of one size: private, one level, two with gaps, three, more groups than there is room for.
STEPS = [
    (),
    [(range(8), 3)],
    [(range(8), 2), ([0, 1, 2], 3), ([5, 6], 1)],
    [(range(6), 4), (range(4), 3), ([2, 3], 5)],
    [([0, 1], 3), ([2, 3], 1), ([4, 5], 5), ([6, 7], 2)],
    [(range(8), 1), ([0, 1], 3), ([2, 3], 1), ([4, 5], 5), ([6, 7], 2)],
]


@pytest.fixture
def backend(flashinfer_backend, monkeypatch) -> FlashInferBackend:
    """With everything shared that can be."""
    share_all(monkeypatch)
    return flashinfer_backend


def plans(backend, sizes=(SIZE,), num_pages=200, max_pages=64):
    """FlashInfer's own of each size."""
    made = backend.fixed_plans(sizes, page_size=4, num_pages=num_pages, max_pages=max_pages)
    return [kinds[:-1] for kinds in made]


def agree(got, expected) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[1], expected[1], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("group", [2, 4], ids=["cuda cores", "tensor cores"])
def test_one_step_after_the_other_is_the_reference(make_batch, backend, group):
    batches = [
        make_batch(TAILS, levels, seed=seed, page_size=4, group=group)
        for seed, levels in enumerate(STEPS)
    ]
    ((plain, shared, deep),) = plans(backend)
    taken = []
    for batch in [*batches, *reversed(batches)]:
        taken.append([fixed.load(batch.plan) for fixed in (plain, shared, deep)])
        for fixed in (plain, shared, deep):
            if fixed.load(batch.plan):
                agree(batch.run(backend, prepared=fixed), batch.run(ReferenceBackend()))
        assert fixed.load(batch.plan)
    # The levels of each step: the first plan that takes it has no more than the step needs.
    needed = [0, 1, 2, 3, 1, 2]
    for found, levels in zip(taken[len(STEPS) :], reversed(needed), strict=True):
        assert found == [levels == 0, levels <= 2, True]
    for fixed, levels in zip((plain, shared, deep), LEVELS, strict=True):
        (wrappers,) = fixed._kinds.values()
        names = {name for name, _ in wrappers._made}
        assert names == {"decode", *(f"shared {number}" for number in range(levels))}
        assert all(level.rows == slice(0, SIZE) for level in wrappers._step.shared)


def record(run):
    """A function that repeats ``run`` and returns its result: a graph's replay on a GPU."""
    run()
    if not torch.cuda.is_available():
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay():
        graph.replay()
        return result

    return replay


def test_a_graph_replays_the_plan_that_is_loaded(make_batch, backend):
    batches = [
        make_batch(TAILS, levels, seed=seed, page_size=4, group=2)
        for seed, levels in enumerate(STEPS)
    ]
    most = max(each.num_pages for each in batches)
    device, first = backend.device, batches[0]
    inputs = [each.clone().to(device) for each in (first.q, first.k, first.v)]
    pages = [
        torch.zeros(most, *first.k_cache.shape[1:], dtype=first.dtype, device=device)
        for _ in range(2)
    ]
    cache = LayerCache(*pages)
    ((_, _, fixed),) = plans(backend, num_pages=most)
    assert fixed.load(first.plan)
    replay = record(lambda: backend.attend(*inputs, cache, fixed, scale=first.scale))
    for batch in [*batches, *reversed(batches)]:
        for place, given in zip(inputs, (batch.q, batch.k, batch.v), strict=True):
            place.copy_(given)
        for place, given in zip(pages, (batch.k_cache, batch.v_cache), strict=True):
            place[: batch.num_pages].copy_(given)
        backend.write_kv(inputs[1], inputs[2], cache, batch.slots.to(device))
        assert fixed.load(batch.plan)
        agree([each.cpu() for each in replay()], batch.run(ReferenceBackend()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into what stands for FlashInfer")
def test_deeper_and_wider_trees_share_what_saves_most(make_batch, backend):
    ((_, shared, deep),) = plans(backend)

    def lengths(fixed, levels) -> list[list[int]]:
        batch = make_batch(TAILS, levels, page_size=4)
        assert fixed.load(batch.plan)
        agree(batch.run(backend, prepared=fixed), batch.run(ReferenceBackend()))
        (wrappers,) = fixed._kinds.values()
        return [level.kv_len.tolist() for level in wrappers._step.shared]

    assert num_groups(SIZE) == 3
    assert lengths(shared, ()) == [[0, 0, 0], [0, 0, 0]]
    assert lengths(shared, [(range(8), 3)]) == [[12, 0, 0], [0, 0, 0]]
    assert lengths(shared, [([0, 1], 3)]) == [[12, 0, 0], [0, 0, 0]]
    assert lengths(shared, [([4, 5], 3)]) == [[0, 12, 0], [0, 0, 0]]
    # Of four groups, and of two with gaps, the best.
    assert lengths(shared, STEPS[4]) == [[0, 20, 0], [0, 0, 0]]
    assert lengths(deep, ()) == [[0, 0, 0]] * 4
    assert lengths(deep, STEPS[3]) == [[16, 0, 0], [12, 0, 0], [0, 20, 0], [0, 0, 0]]
    # Of five levels the four that save the most.
    five = [(range(8), 1), (range(7), 5), (range(6), 2), (range(5), 3), (range(4), 4)]
    assert lengths(deep, five) == [[20, 0, 0], [8, 0, 0], [12, 0, 0], [16, 0, 0]]


def test_what_does_not_fit_is_not_loaded(make_batch, backend):
    ((plain, _, deep),) = plans(backend, max_pages=3)
    small = make_batch(TAILS, page_size=4)
    assert plain.load(small.plan) and deep.load(small.plan)
    for fixed in (plain, deep):
        small.run(backend, prepared=fixed)
    many = make_batch([(1, 30)] * SIZE, page_size=4)
    mixed_up = make_batch(TAILS, [([0, 2], 3)], page_size=4)
    for fixed in (plain, deep):
        assert not fixed.load(many.plan)
        assert not fixed.load(mixed_up.plan)
        assert fixed.load(small.plan)
        agree(small.run(backend, prepared=fixed), small.run(ReferenceBackend()))
        with pytest.raises(ValueError, match="query_start of the plan is of 7; here it must be of"):
            fixed.load(make_batch(TAILS[1:], page_size=4).plan)
        drafted = [(2, TAILS[0][1]), *TAILS[2:]]  # as many rows, of fewer sequences
        assert not fixed.load(make_batch(drafted, page_size=4).plan)


def test_layers_of_two_kinds_are_loaded_together(make_batch, backend):
    first, second = (make_batch(TAILS, STEPS[at], seed=at, page_size=4) for at in (1, 2))
    ((_, fixed, _),) = plans(backend)
    assert fixed.load(first.plan)
    for scale in (0.1, 0.2):  # as in a captured pass, which learns the kinds
        first.scale = scale
        first.run(backend, prepared=fixed)
    assert fixed.load(second.plan)
    for scale in (0.1, 0.2):
        second.scale = scale
        agree(second.run(backend, prepared=fixed), second.run(ReferenceBackend()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into what stands for FlashInfer")
def test_plans_of_all_sizes_share_their_memory(make_batch, monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    backend = FlashInferBackend(torch.device("cpu"))
    made = plans(backend, (SIZE, 2, 1))
    assert [len(each) for each in made] == [3, 2, 1]
    options = {"page_size": 4, "dtype": torch.bfloat16, "head_dim": 64}
    for size, each in zip((SIZE, 2, 1), made, strict=True):
        batch = make_batch(TAILS[:size], **options)
        for fixed in each:
            assert fixed.load(batch.plan)
            batch.run(backend, prepared=fixed)
    places = {
        name: {wrapper.buffers[name].data_ptr() for wrapper in library.wrappers}
        for name in ("page_indices", "last_page_len")
    }
    # The last level, and four shared ones.
    assert {name: len(found) for name, found in places.items()} == dict.fromkeys(places, 5)
    assert len({wrapper.workspace.data_ptr() for wrapper in library.wrappers}) == 1


def test_a_large_size_has_room_for_partial_results():
    """What FlashInfer reserves in graph mode: 287 tiles of 128 packed rows, 4 heads a KV head."""
    kind = LayerKind(None, None, 0.1, 32, 8, 128, 16, torch.bfloat16, torch.bfloat16)
    model = CostModel(choose_tiles(128, 2), group=4, kv_heads=8, head_dim=128, key_bytes=512)
    given = torch.empty(128 * 2**20, dtype=torch.uint8, device="meta")
    assert FixedMemory(kind, 512, 100, model, given).workspace is given
    needed = 287 * 128 // 4 * 32 * (128 + 1) * 4
    assert needed <= FixedMemory(kind, 1024, 100, model, given).workspace.numel() < 1.01 * needed


def test_steps_with_rows_of_prompts_are_ours(make_batch, backend, monkeypatch):
    """Sizes beyond the most sequences have no plans of FlashInfer's, which take one row of each."""
    monkeypatch.setattr(triton_plans, "_WAVES", 0)  # where kernels are interpreted, for speed
    options = {"page_size": 4, "num_pages": 200, "max_pages": 64}
    decoding, larger = backend.fixed_plans((SIZE, 2 * SIZE), most_sequences=SIZE, **options)
    assert [type(each) for each in decoding] == [FlashInferFixedPlan] * 3 + [TritonFixedPlan]
    assert [type(each) for each in larger] == [TritonFixedPlan]
    batch = make_batch([(3, 4), (1, 9), (4, 0)], [([0, 1], 2)], page_size=4)
    assert [fixed.load(batch.plan) for fixed in decoding] == [False, False, False, True]
    agree(batch.run(backend, prepared=decoding[-1]), batch.run(ReferenceBackend()))


def test_a_graph_is_captured_by_any_step_and_takes_no_skewed_one(make_batch, backend, monkeypatch):
    """The captured one has sequences of one key, of which some numbers fill no whole waves."""
    monkeypatch.setattr(fixed_plans, "waits_for_the_longest", lambda level, model: True)
    ((plain, *_),) = plans(backend)
    plain.unsplit = True
    batch = make_batch([(1, 0)] * SIZE, page_size=4)
    assert plain.load(batch.plan)
    agree(batch.run(backend, prepared=plain), batch.run(ReferenceBackend()))
    assert not plain.load(batch.plan)
