"""Experts in Triton: grouped as they are chosen, and equal to each row's experts by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coppice.kernels.triton.experts import blocks_of, mix_experts

HIDDEN, INNER, EXPERTS = 48, 40, 5
GATE = (1.702, 7.0)


def problem(rows: int, chosen: int, dtype: torch.dtype, *, biased: bool) -> dict[str, Any]:
    """Expert 3 is chosen by no row, and expert 0 by most."""
    torch.manual_seed(rows)
    numbers = torch.rand(rows, EXPERTS)
    numbers[:, 3], numbers[:, 0] = -1, numbers[:, 0] + 0.5
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given: dict[str, Any] = {
        "x": torch.randn(rows, HIDDEN).to(dtype),
        "chosen": numbers.topk(chosen).indices,
        "shares": torch.rand(rows, chosen),
        "gate_up": torch.randn(EXPERTS, 2 * INNER, HIDDEN).to(dtype),
        "down": torch.randn(EXPERTS, HIDDEN, INNER).to(dtype),
    }
    given["gate_up"][3], given["down"][3] = torch.nan, torch.nan  # never read
    if biased:
        given["gate_up_bias"] = torch.randn(EXPERTS, 2 * INNER).to(dtype)
        given["down_bias"] = torch.randn(EXPERTS, HIDDEN).to(dtype)
    return {name: each.to(device) for name, each in given.items()}


def expected(given: dict[str, Any], gate: tuple[float, float] | None) -> torch.Tensor:
    wide = {name: each if name == "chosen" else each.double() for name, each in given.items()}
    out = torch.zeros_like(wide["x"])
    for row, x in enumerate(wide["x"]):
        for expert, share in zip(wide["chosen"][row], wide["shares"][row], strict=True):
            both = wide["gate_up"][expert] @ x
            if "gate_up_bias" in wide:
                both = both + wide["gate_up_bias"][expert]
            first, up = both.chunk(2)
            if gate is None:
                active = torch.nn.functional.silu(first) * up
            else:
                first, up = first.clamp(max=gate[1]), up.clamp(-gate[1], gate[1])
                active = (up + 1) * first * torch.sigmoid(first * gate[0])
            made = wide["down"][expert] @ active
            if "down_bias" in wide:
                made = made + wide["down_bias"][expert]
            out[row] += share * made
    return out


@pytest.mark.parametrize(
    ("rows", "chosen", "dtype", "gate"),
    [
        (1, 1, torch.float32, None),
        (7, 3, torch.float32, GATE),
        (70, 2, torch.float32, None),
        (9, 4, torch.bfloat16, GATE),
        (150, 2, torch.bfloat16, None),
    ],
)
def test_rows_get_what_their_experts_make(
    rows: int, chosen: int, dtype: torch.dtype, gate: tuple[float, float] | None
) -> None:
    given = problem(rows, chosen, dtype, biased=gate is not None)
    out = mix_experts(**given, gate=gate)
    assert out.dtype == dtype
    theirs = expected(given, gate)
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    assert (out.double() - theirs).norm() < tolerance * theirs.norm()


def test_a_row_has_the_same_bits_alone() -> None:
    given = problem(33, 2, torch.float32, biased=True)
    together = mix_experts(**given, deterministic=True)
    for first, last in ((0, 1), (4, 9)):
        own = {
            name: each[first:last] if name in ("x", "chosen", "shares") else each
            for name, each in given.items()
        }
        assert torch.equal(mix_experts(**own, deterministic=True), together[first:last])


@pytest.mark.parametrize("rows", [1, 16])
def test_blocks_cover_each_pair_once(rows: int) -> None:
    """Their number depends on shapes alone, also where one expert has all pairs."""
    for chosen in (
        torch.randint(0, 9, (40, 1)),
        torch.zeros(40, 1, dtype=torch.long),
        torch.full((40, 1), 8),
    ):
        order, blocks = blocks_of(chosen, 9, rows)
        assert blocks.shape == (min(40, (40 + 9 * (rows - 1)) // rows), 3)
        seen: list[int] = []
        for expert, first, end in blocks.tolist():
            if expert < 0:
                continue
            assert 0 < end - first <= rows
            mine = order[first:end]
            assert (chosen[mine] == expert).all()
            seen += mine.tolist()
        assert sorted(seen) == list(range(40))


def test_nothing_is_made_of_no_rows_and_wrong_shapes_are_refused() -> None:
    given = problem(4, 2, torch.float32, biased=False)
    none = {name: each[:0] if len(each) == 4 else each for name, each in given.items()}
    assert mix_experts(**none).shape == (0, HIDDEN)
    with pytest.raises(ValueError, match="down"):
        mix_experts(**given | {"down": given["down"].transpose(1, 2).contiguous()})
