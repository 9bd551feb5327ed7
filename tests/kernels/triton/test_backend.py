"""What the Triton backend has beyond the others: types, soft-cap, 8-bit caches, determinism, norms.

Without a GPU the kernels are interpreted, at small sizes; with one they are compiled.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice.kernels.attention.interface import AttentionPlan, LayerCache, SharedStretch
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.backends import select_backend
from coppice.kernels.schedule import items as tree_schedule
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.tiles import head_blocks, product_tile
from coppice.kernels.triton import products
from coppice.kernels.triton.products import steady_linear
from coppice.kernels.triton.rows import quantize_e4m3, rms_norm, silu_mul

REFERENCE = ReferenceBackend()
TAILS = [(1, 0), (5, 3), (1, 17), (13, 8), (1, 33)]
LEVELS = [(range(5), 3), ([0, 2, 4], 2)]


@pytest.mark.parametrize("window", [None, 9])
def test_merged_pieces_equal_the_reference(make_batch, triton_backend, size, fine_splits, window):
    batch = make_batch([(rows, cached * size) for rows, cached in TAILS], LEVELS, page_size=16)
    model = triton_backend.cost_model(4, 2, 16, torch.float32, torch.float32)
    schedule = tree_schedule.build_tree_schedule(batch.plan, window, model)
    assert schedule.num_partials > 0
    assert window is not None or len(schedule.shared) == 2
    for got, expected in zip(
        batch.run(triton_backend, window), batch.run(REFERENCE, window), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types(make_batch, triton_backend, size, dtype):
    tails = [(rows, cached * size) for rows, cached in TAILS]
    batch = make_batch(tails, LEVELS, dtype=dtype, head_dim=64)
    out, lse = batch.run(triton_backend)
    expected, expected_lse = batch.run(REFERENCE)
    assert out.dtype == dtype
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("group", "kv_heads", "dtype"),
    [(32, 1, torch.bfloat16), (20, 2, torch.float32),
     *(pytest.param(71, 1, dtype, marks=pytest.mark.slow)
       for dtype in (torch.bfloat16, torch.float32))],
)  # fmt: skip
def test_more_heads_than_a_tile_has_rows(
    make_batch, triton_backend, fine_splits, group, kv_heads, dtype, deterministic
):
    """One KV head for all query heads, as some models have it: packed in parts where need be."""
    backend = select_backend("triton", triton_backend.device, deterministic=deterministic)
    tails, levels = [(1, 0), (3, 3), (1, 17)], [(range(3), 2), ([0, 2], 2)]
    batch = make_batch(tails, levels, group=group, kv_heads=kv_heads, dtype=dtype)
    out, lse = batch.run(backend)
    expected, expected_lse = batch.run(REFERENCE)
    tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("head_dim", [80, pytest.param(96, marks=pytest.mark.slow), 20])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_heads_between_powers_of_two(make_batch, triton_backend, size, head_dim, dtype):
    """Multiplied in two blocks by wide tiles: chunks of prefill, alone and below a stretch."""
    tails = [(70, 40 * size), (1, 5), (3, 0), (1, 33)]
    batch = make_batch(tails, LEVELS[:0], head_dim=head_dim, dtype=dtype, page_size=16)
    assert head_blocks(head_dim, 128)[1] or head_dim == 20
    shared = make_batch(tails, [(range(4), 3)], head_dim=head_dim, dtype=dtype, page_size=16)
    for each in (batch, shared):
        out, lse = each.run(triton_backend)
        expected, expected_lse = each.run(REFERENCE)
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_cap(make_batch, triton_backend, softcap):
    batch = make_batch(TAILS, LEVELS)
    batch.scale = 3.0
    for got, expected in zip(
        batch.run(triton_backend, 20, softcap), batch.run(REFERENCE, 20, softcap), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("branches", [False, True])
def test_8_bit_cache(make_batch, triton_backend, branches):
    """It is written as torch rounds, and read as the reference reads it; large numbers are cut."""
    rows = [rows for rows, _ in TAILS]
    longest = rows.index(max(rows))
    tree = [row // 2 for row in range(rows[longest] - 1)]  # each row has two that follow
    batch = make_batch(TAILS, LEVELS, trees={longest: tree} if branches else {})
    device = triton_backend.device
    scales = torch.tensor([0.01, 0.3]), torch.tensor([0.02, 0.1])
    shape = batch.k_cache.shape
    slots = torch.arange(shape[0] * shape[1])
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, len(slots), *shape[2:], generator=generator)
    k[7] = 1e4
    caches = {}
    for backend, place in ((REFERENCE, torch.device("cpu")), (triton_backend, device)):
        made = [torch.zeros(shape, dtype=torch.float8_e4m3fn, device=place) for _ in range(2)]
        cache = LayerCache(*made, tuple(each.to(place) for each in scales))
        backend.write_kv(k.to(place), v.to(place), cache, slots.to(place))
        out, lse = backend.attend(
            batch.q.to(place), batch.k.to(place), batch.v.to(place), cache,
            backend.prepare(batch.plan), scale=0.25,
        )  # fmt: skip
        caches[backend.name] = *(cache.float().cpu() for cache in made), out.cpu(), lse.cpu()
    normal = 2.0**-6  # below it the interpreter's conversion does not round
    for ours, theirs in zip(caches["triton"][:2], caches["reference"][:2], strict=True):
        # To the bit where division is exact to the last one, as it is not on a GPU.
        assert (ours == theirs)[theirs.abs() > normal].float().mean() > 0.999
        torch.testing.assert_close(ours, theirs, rtol=2.0**-3, atol=2.0**-9)
    assert caches["triton"][0].flatten(0, 1)[7].max() == 448
    for ours, theirs in zip(caches["triton"][2:], caches["reference"][2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_feature_with_every_other(
    make_batch, triton_backend, monkeypatch, dtype, eight_bits, page_size, window, softcap, tree,
    head_dim, deterministic,
):  # fmt: skip
    """Results and log-sum-exps are the reference's; pages without an owner are NaN."""
    monkeypatch.setattr(CostModel, "row_bytes", -(10**9))  # all that can be is shared
    backend = select_backend("triton", triton_backend.device, deterministic=deterministic)
    levels = [(range(3), 1)] if tree else []
    batch = make_batch(
        [(1, 7), (6, 3), (1, 21)], levels, dtype=dtype, page_size=page_size, head_dim=head_dim
    )
    scales = (torch.tensor([0.01, 0.03]), torch.tensor([0.02, 0.015])) if eight_bits else None
    stored = [batch.k_cache, batch.v_cache]
    if scales is not None:
        stored = [
            (cache.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            for cache, scale in zip(stored, scales, strict=True)
        ]
    found = []
    for each in (backend, REFERENCE):
        place = getattr(each, "device", torch.device("cpu"))
        q, k, v, slots = (one.to(place) for one in (batch.q, batch.k, batch.v, batch.slots))
        on_it = None if scales is None else tuple(scale.to(place) for scale in scales)
        cache = LayerCache(*(one.to(place, copy=True) for one in stored), on_it)
        each.write_kv(k, v, cache, slots)
        out, lse = each.attend(
            q, k, v, cache, each.prepare(batch.plan, num_pages=batch.num_pages),
            scale=0.5, sliding_window=window, logit_softcap=softcap,
        )  # fmt: skip
        assert out.dtype == dtype and lse.dtype == torch.float32
        found.append((out.cpu(), lse.cpu()))
    # Of 8-bit floats the interpreter rounds some to the neighbour: see test_8_bit_cache.
    tolerance = max(2 * torch.finfo(dtype).eps, 3e-2 if eight_bits else 2e-5)
    for ours, theirs in zip(*found, strict=True):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("scaled", [False, True])
def test_rotation_with_the_write(triton_backend, head_dim, scaled):
    """Against rotating first and writing then, on every backend's default way."""
    device = triton_backend.device
    qk, v = torch.randn(5, 6, head_dim, device=device), torch.randn(5, 4, head_dim, device=device)
    cos, sin = torch.randn(2, 5, 1, head_dim, device=device)
    slots = torch.tensor([3, 1, 9, 0, 11], device=device)
    dtype = torch.float8_e4m3fn if scaled else torch.float32
    scales = (torch.ones(2, device=device),) * 2 if scaled else None
    found = []
    for backend in (triton_backend, REFERENCE):
        caches = [torch.zeros(3, 4, 2, head_dim, dtype=dtype, device=device) for _ in range(2)]
        cache = LayerCache(*caches, scales)
        made = backend.write_rotated(qk, v[:, 2:], cos, sin, cache, slots)
        found.append([*made, *(cache.float() for cache in caches)])
    for ours, theirs in zip(*found, strict=True):
        tolerance = 2.0**-3 if scaled else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-2 if scaled else 1e-5)


@pytest.mark.parametrize("shape", [(3, 40), (3, 6, 16)])
def test_norm(triton_backend, shape):
    device = triton_backend.device
    x = torch.randn(2, *shape, device=device)[0]
    weight = torch.randn(*shape[1:], device=device)
    expected = torch.nn.functional.rms_norm(x, shape[-1:], eps=1e-3) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), expected, rtol=1e-5, atol=1e-5)
    added = torch.randn(shape, device=device)
    total = x + added
    expected = torch.nn.functional.rms_norm(total, shape[-1:], eps=1e-3) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-3, added), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, total)  # the residual is the sum
    with pytest.raises(ValueError, match=r"added is \(2,.*contiguous"):
        rms_norm(x, weight, 1e-3, added[:2])
    with pytest.raises(ValueError, match=r"weight is \(5,\)"):
        rms_norm(x, torch.ones(5, device=device), 1e-3)
    with pytest.raises(ValueError, match="contiguous within a row"):
        rms_norm(x.transpose(0, -1), weight, 1e-3)


def test_16_bit_sums_and_products_are_rounded_once(triton_backend):
    device = triton_backend.device
    x, added = torch.randn(2, 5, 1100, device=device).bfloat16()
    weight = torch.ones(1100, dtype=torch.bfloat16, device=device)
    exact = torch.nn.functional.rms_norm((x + added).float(), (1100,), eps=1e-3)
    # Triton's interpreter cuts bits off where a GPU rounds, in the sum and in the result.
    close = {"rtol": 2.0**-8 if device.type == "cuda" else 2.0**-6, "atol": 1e-6}
    torch.testing.assert_close(rms_norm(x, weight, 1e-3, added).float(), exact, **close)
    both = torch.randn(5, 2 * 1100, device=device).bfloat16()
    gate, up = both.float().chunk(2, dim=1)
    ours = silu_mul(both)
    assert ours.dtype == torch.bfloat16 and ours.is_contiguous()
    exact = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(ours.float(), exact, **close)
    assert silu_mul(both[:0]).shape == (0, 1100)
    with pytest.raises(ValueError, match=r"gate_up has shape \(5, 7\)"):
        silu_mul(both[:, :7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 144])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_quantized_rows(triton_backend, width, dtype):
    """Each row by itself: beside one that is large, one of zeros and one that is no number."""
    x = torch.randn(9, 2 * width)[:, :width].to(triton_backend.device, dtype)
    x[3] *= 1000
    x[4] = 0
    x[5, 7], x[6, 7] = torch.nan, torch.inf
    levels, scales = quantize_e4m3(x)
    assert (levels.dtype, levels.shape) == (torch.float8_e4m3fn, x.shape)
    assert scales.shape == (9, 1)
    fine = scales.isfinite().flatten().nonzero().flatten().tolist()
    assert fine == [0, 1, 2, 3, 4, 7, 8]
    exact = x[fine].float()
    torch.testing.assert_close(scales[fine, 0], exact.abs().amax(1).clamp(min=1e-12) / 448)
    expected = (exact / scales[fine]).to(torch.float8_e4m3fn).float()
    normal = expected.abs() > 2.0**-6  # below it the interpreter's conversion does not round
    ours = levels.float()[fine]
    assert (ours == expected)[normal].float().mean() > 0.999
    assert ours.abs().amax(1).tolist() == [448 if row != 4 else 0 for row in fine]
    assert quantize_e4m3(x[:0])[1].shape == (0, 1)
    with pytest.raises(ValueError, match="contiguous within a row"):
        quantize_e4m3(x.t())


def test_copies_of_odd_pages_are_refused(triton_backend):
    odd = torch.zeros(2, 1, 1, 3, dtype=torch.int8)
    caches = [LayerCache(odd, odd)]
    with pytest.raises(ValueError, match="3 bytes; it must be a multiple of 4"):
        triton_backend.copy_pages(caches, [0], [1])


def test_too_wide_heads_are_refused(make_batch, triton_backend):
    with pytest.raises(ValueError, match="q has heads of 272; it must be at most 256"):
        make_batch([(1, 1)], head_dim=272).run(triton_backend)


@pytest.mark.slow
def test_the_same_batch_gives_the_same_bits(make_batch, triton_backend, size, fine_splits):
    batch = make_batch([(rows, cached * size) for rows, cached in TAILS], LEVELS)
    first = batch.run(triton_backend)
    for again, was in zip(batch.run(triton_backend), first, strict=True):
        assert torch.equal(again, was)


class Sequence:
    """Queries, keys and values of one sequence, to be attended in any steps."""

    kv_heads, group, head_dim = 2, 2, 16

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        packed = torch.randn(
            length, 2 * self.kv_heads + self.kv_heads * self.group, self.head_dim,
            generator=generator,
        )  # fmt: skip
        heads = self.kv_heads * self.group
        self.q, self.k, self.v = packed.split([heads, self.kv_heads, self.kv_heads], dim=1)


def attend_parts(backend, parts, page_size, window, shared_pages=0, seed=0):
    """One step of ``(sequence, begin, end)``: rows ``begin .. end``, what lies before is cached.

    Returns outputs and log-sum-exps of each part. Pages are dealt out at random.
    """
    device = backend.device
    used, tables = shared_pages, []
    for _, _, end in parts:
        more = -(-end // page_size) - shared_pages
        tables.append([*range(shared_pages), *range(used, used + more)])
        used += more
    order = np.random.default_rng(seed).permutation(used + 1)
    shape = (used + 1, page_size, Sequence.kv_heads, Sequence.head_dim)
    caches = [torch.full(shape, torch.nan) for _ in range(2)]
    for (sequence, _, end), table in zip(parts, tables, strict=True):
        at = np.arange(end)
        slots = order[np.array(table)[at // page_size]] * page_size + at % page_size
        for cache, new in zip(caches, (sequence.k, sequence.v), strict=True):
            cache.flatten(0, 1)[slots] = new[:end]
    stretches = ()
    if shared_pages:
        stretches = (SharedStretch(0, shared_pages, np.arange(len(parts), dtype=np.int32)),)
    counts = [end - begin for _, begin, end in parts]
    plan = AttentionPlan(
        page_size=page_size,
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        context_len=np.array([end for _, _, end in parts], np.int32),
        page_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        page_indices=np.concatenate([order[table] for table in tables]).astype(np.int32),
        stretches=stretches,
    )
    q, k, v = (
        torch.cat([getattr(each, name)[a:b] for each, a, b in parts]).to(device) for name in "qkv"
    )
    out, lse = backend.attend(
        q, k, v, LayerCache(*(cache.to(device) for cache in caches)), backend.prepare(plan),
        scale=0.25, sliding_window=window,
    )  # fmt: skip
    return [(a, b) for a, b in zip(out.cpu().split(counts), lse.cpu().split(counts), strict=True)]


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 21])
def test_deterministic_is_bit_for_bit(triton_backend, size, monkeypatch, window):
    """A row's bits do not change with chunks, hits, company, sharing, pages or page ids."""
    monkeypatch.setattr(tree_schedule, "DETERMINISTIC_SPLIT", 64 if size > 1 else 32)
    backend = select_backend("triton", triton_backend.device, deterministic=True)
    length = 56 * size
    line, other = Sequence(length, 1), Sequence(length, 2)
    other.k[: length // 2], other.v[: length // 2] = line.k[: length // 2], line.v[: length // 2]
    ((cold, cold_lse),) = attend_parts(backend, [(line, 0, length)], 16, window)

    for begin, end in ((0, length // 3), (length // 3, length // 2 + 7)):  # chunks
        ((out, lse),) = attend_parts(backend, [(line, begin, end)], 16, window, seed=1)
        assert torch.equal(out, cold[begin:end]) and torch.equal(lse, cold_lse[begin:end])
    for begin in (length - 1, length - 5):  # hits, and decoding in company that shares a prefix
        parts = [(other, length - 9, length), (line, begin, length), (other, length - 1, length)]
        shared = length // 2 // 16
        _, (out, lse), _ = attend_parts(backend, parts, 16, window, shared, seed=2)
        assert torch.equal(out, cold[begin:]) and torch.equal(lse, cold_lse[begin:])


def test_deterministic_shares_nothing(make_batch, triton_backend):
    backend = select_backend("triton", triton_backend.device, deterministic=True)
    batch = make_batch(TAILS, LEVELS)
    model = replace(backend.cost_model(4, 2, 16, torch.float32, torch.float32), launch_bytes=0)
    assert model.tiles.few == model.tiles.many
    schedule = tree_schedule.build_tree_schedule(batch.plan, None, model, deterministic=True)
    assert not schedule.shared
    for got, expected in zip(batch.run(backend), batch.run(REFERENCE), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs", "parts"), [(64, 48, 1), (200, 130, 1), (290, 70, 3)])
def test_steady_products(triton_backend, monkeypatch, dtype, inputs, outputs, parts):
    """Right, and each row with the bits that it has alone, in a batch and at any place of it."""
    monkeypatch.setattr(products, "_PART_INPUTS", inputs // parts)
    tile = product_tile(dtype.itemsize)
    assert -(-inputs // products.part_inputs(inputs, outputs, tile)) == parts
    device = triton_backend.device
    x = torch.randn(70, 2 * inputs, device=device)[:, :inputs].to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    out = steady_linear(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    # Triton's interpreter cuts bits off where a GPU rounds.
    tolerance = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance * inputs**0.5)
    if parts > 1:  # the programs of a large batch add up all parts
        monkeypatch.setattr(products, "_DIVIDED_BELOW", 1)
        assert torch.equal(steady_linear(x, weight, bias), out)
        monkeypatch.undo()
        monkeypatch.setattr(products, "_PART_INPUTS", inputs // parts)
    for first, last in ((0, 1), (41, 42), (3, 69), (33, 40)):
        assert torch.equal(steady_linear(x[first:last], weight, bias), out[first:last])
    assert steady_linear(x[:0], weight).shape == (0, outputs)
    with pytest.raises(ValueError, match=rf"x is .* \(T, {inputs}\), contiguous within a row"):
        steady_linear(x[:, :-1], weight)
    with pytest.raises(ValueError, match="weight has strides"):
        steady_linear(x, weight.T.contiguous().T)
