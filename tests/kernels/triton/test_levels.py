"""The kernels around FlashInfer's launches, beside the same by torch."""

from __future__ import annotations

import fake_flashinfer
import pytest
import torch

from coppice.kernels.triton import levels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("block", [4, 512])
def test_runs_of_page_ids_are_gathered(monkeypatch, block):
    monkeypatch.setattr(levels, "_GATHERED", block)
    tables = torch.randperm(60, dtype=torch.int32)
    starts, counts = torch.tensor([[40, 3, 3, 20], [9, 1, 4, 2]], dtype=torch.int32)
    begins = torch.tensor([0, 9, 12, 16], dtype=torch.int32)
    expected = torch.full((20,), -1, dtype=torch.int32)
    fake_flashinfer.gather_runs(tables, starts, counts, begins, expected, 9)
    pages = torch.full((20,), -1, dtype=torch.int32).to(DEVICE)
    given = [each.to(DEVICE) for each in (tables, starts, counts, begins)]
    levels.gather_runs(*given, pages, 9)
    assert torch.equal(pages.cpu(), expected)


@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "placed", "scaled"),
    [(6, 3, 40, True, True), (20, 4, 16, False, False)],
)
def test_levels_are_merged_in_float32(heads, group, head_dim, placed, scaled):
    """More heads than a program takes, rows beside some levels, and levels without keys."""
    torch.manual_seed(0)
    rows, count = 5, 4
    parts = torch.randn(count, rows, heads, head_dim).to(torch.float16)
    logs = torch.randn(count, rows, heads) * 4
    bounds = torch.tensor([[0, 5], [0, 3], [2, 5], [1, 2]], dtype=torch.int32)
    logs[2, 3] = -torch.inf
    parts[1, 3:] = parts[2, :2] = torch.nan  # outside: memory that nobody has written
    parts[2, 3] = torch.nan
    places = torch.tensor([3, 0, 4, 1, 2]) if placed else None
    scales = torch.rand(heads // group) if scaled else None
    given = parts, logs, bounds, places, scales
    parts32 = parts.nan_to_num().float(), *given[1:]
    expected = fake_flashinfer.merge_parts(*parts32, group)
    sent = [each if each is None else each.to(DEVICE) for each in given]
    if DEVICE.type == "cpu":
        sent[0] = sent[0].float()  # the interpreter works on the bits of 16-bit floats
    found = levels.merge_parts(*sent, group)
    exact = 2e-3 if sent[0].dtype == torch.float16 else 2e-6
    torch.testing.assert_close(found[0].float().cpu(), expected[0], rtol=exact, atol=exact)
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)


def test_many_levels_are_rounded_once():
    """Nine equal shares of 1 and of what is less than half a step of float16 above it."""
    parts = torch.ones(9, 1, 1, 16)
    parts[1:] += 2**-11
    logs = torch.zeros(9, 1, 1)
    bounds = torch.tensor([[0, 1]] * 9, dtype=torch.int32)
    given = [each.to(DEVICE) for each in (parts, logs, bounds)]
    out, lse = levels.merge_parts(*given, None, None, 1)
    assert out.cpu().flatten().tolist() == pytest.approx([1 + 8 / 9 * 2**-11] * 16, abs=1e-7)
    assert lse.item() == pytest.approx(2.1972246)
