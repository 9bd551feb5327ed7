"""The choice of tokens by numba, torch and Triton, against what a sort finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice.kernels.sampling import choose as choice
from coppice.kernels.sampling.choose import choose, compiled_choice, likeliest
from coppice.kernels.sampling.choose_triton import choose_rows
from coppice.kernels.sampling.columns import COLUMNS
from coppice.kernels.triton.base import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


def by_sorting(logits, columns):
    """Token of each row, and how far its number is from where another one would be chosen."""
    tokens, margins = [], []
    for row, (temperature, top_k, top_p, min_p, uniform) in zip(logits, columns, strict=True):
        scaled = (row - row.max()) / np.float32(temperature)
        weights = scaled.exp().double().numpy()
        order = np.lexsort([np.arange(len(weights)), -weights])
        if top_k < len(weights):
            order = order[: int(top_k)]
        if top_p < 1:
            sums = np.cumsum(weights[order])
            order = order[sums - weights[order] < top_p * sums[-1]]
        order = order[weights[order] >= min_p * weights.max()]
        kept = np.zeros_like(weights)
        kept[order] = weights[order]
        sums = np.cumsum(kept)
        target = uniform * sums[-1]
        token = int(np.argmax((sums > target) & (kept > 0)))
        if top_k == 1:
            token = int(row.argmax())
        tokens.append(token)
        margins.append(min(abs(sums - target)) / sums[-1] if top_k != 1 else 1.0)
    return tokens, np.array(margins)


def compiled(logits, columns):
    assert compiled_choice() is not None, "numba works on every machine that runs the tests"
    return choose(logits, columns).tolist()


def by_torch(logits, columns):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "compiled_choice", lambda: None)
        return choose(logits, columns).tolist()


def ways():
    return [
        pytest.param(compiled, id="numba"),
        pytest.param(by_torch, id="torch"),
        pytest.param(
            lambda logits, columns: choose_rows(
                logits.to(DEVICE), torch.from_numpy(columns).to(DEVICE)
            ).tolist(),
            id="triton",
        ),
    ]


def numbers(rows, generator, vocabulary):
    """Filters of every kind and combination, and none."""
    columns = np.ones((rows, COLUMNS))
    columns[:, 0] = generator.choice([1e-4, 0.3, 1.0, 1.7, 50.0], rows)
    columns[:, 1] = generator.choice([1, 2, 5, 40, 300, vocabulary, vocabulary], rows)
    columns[:, 2] = generator.choice([1e-6, 0.3, 0.5, 0.9, 0.999, 1.0, 1.0], rows)
    columns[:, 3] = generator.choice([0.0, 0.0, 0.05, 0.5, 1.0], rows)
    columns[:, 4] = generator.random(rows)
    return columns


KINDS = ["float32", "bfloat16", "few values", "flat", "banned"]
# Interpreted, the kernel takes ten seconds and more.
CASES = [
    pytest.param(
        way.values[0],
        kind,
        id=f"{kind}-{way.id}",
        marks=[pytest.mark.slow] * (way.id == "triton" and INTERPRETED and kind != "banned"),
    )
    for kind in KINDS
    for way in ways()
]


@pytest.mark.parametrize(("way", "kind"), CASES)
def test_the_token_is_that_of_a_sort(way, kind):
    generator = np.random.default_rng(1)
    rows, vocabulary = (12, 333) if INTERPRETED else (256, 32_003)
    logits = torch.from_numpy(generator.normal(0, 3, (rows, vocabulary)).astype(np.float32))
    if kind == "bfloat16":
        logits = logits.bfloat16().float()
    if kind == "few values":  # most tokens have equals, at every border
        logits = logits.round().clamp(-2, 2)
    if kind == "flat":
        logits = torch.full_like(logits, -7.25)
    if kind == "banned":
        logits[torch.from_numpy(generator.random((rows, vocabulary)) < 0.9)] = -torch.inf
        logits[:, 5] = 1.0
    columns = numbers(rows, generator, vocabulary)
    expected, margins = by_sorting(logits, columns)
    # A number that lies next to a border may fall to either side of it, by how sums are rounded.
    clear = margins > 1e-6
    assert clear.mean() > 0.9
    found = np.array(way(logits, columns))
    assert (found == expected)[clear].all()
    assert len(set(expected)) > 3


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            *way.values,
            id=way.id,
            marks=[pytest.mark.slow] * (way.id == "triton" and INTERPRETED),
        )
        for way in ways()
    ],
)
def test_equals_are_kept_by_their_ids(way):
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, -torch.inf]])
    vocabulary = logits.shape[1]

    def reached(**given):
        columns = np.array([[1.0, vocabulary, 1.0, 0.0, 0.0]] * 16)
        for name, value in given.items():
            columns[:, ("temperature", "top_k", "top_p", "min_p").index(name)] = value
        columns[:, 4] = np.arange(16) / 16
        return sorted(set(way(logits.repeat(16, 1), columns)))

    assert reached() == [0, 1, 2, 3, 4, 5]
    assert reached(top_k=3) == [1, 2, 4]
    assert reached(top_k=1) == [1]
    assert reached(top_k=5) == [0, 1, 2, 4, 5]
    assert reached(min_p=0.5) == [1, 2, 4, 5]
    assert reached(top_p=0.5) == [1, 2, 4]
    # Two of four equals are exactly half, and no third is needed.
    assert reached(top_p=0.5, top_k=4) == [1, 2]
    assert reached(top_p=0.51, top_k=4) == [1, 2, 4]
    assert reached(top_p=1e-9) == [1]
    assert reached(temperature=1e-4) == [1, 2, 4, 5]


@pytest.mark.parametrize("way", ways())
def test_a_row_does_not_depend_on_the_others(way):
    generator = np.random.default_rng(2)
    rows = 5 if INTERPRETED else 12
    logits = torch.from_numpy(generator.normal(0, 2, (rows, 100)).astype(np.float32))
    columns = numbers(rows, generator, 100)
    together = way(logits, columns)
    alone = [way(logits[i : i + 1], columns[i : i + 1])[0] for i in range(rows)]
    assert together == alone


def test_the_greatest_numbers_choose_the_last_token_that_is_kept():
    for way in (each.values[0] for each in ways()):
        logits = torch.tensor([[1.0, 1.0, 1.0, -200.0]])
        columns = np.array([[1.0, 4, 1.0, 0.0, 1 - 2.0**-53]])
        assert way(logits, columns) == [2]


@pytest.mark.parametrize("rows", [1, 40])
def test_rows_that_are_not_finite_get_some_token(rows):
    """The tokens of the other rows are what they are without them."""
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(0, 2, (rows, 5000)).astype(np.float32))
    columns = numbers(rows, generator, 5000)
    expected = compiled(logits, columns)
    for bad in (torch.nan, torch.inf, -torch.inf):
        logits[0] = bad
        columns[0] = [1.0, 50, 0.9, 0.1, 0.5]
        found = compiled(logits, columns)
        assert 0 <= found[0] < 5000
        assert found[1:] == expected[1:]
    logits[:] = torch.full((5000,), -torch.nan)
    logits[:, 77] = 1.0
    columns[:, 1] = 50  # torch takes the first NaN for the greatest
    assert set(compiled(logits, columns)) == {77}


@pytest.mark.parametrize("width", [1, 2, 63, 1024, 1025, 4097])
def test_any_size_of_vocabulary(width):
    generator = np.random.default_rng(4)
    logits = torch.from_numpy(generator.normal(0, 3, (64, width)).astype(np.float32))
    columns = numbers(64, generator, width)
    expected, margins = by_sorting(logits, columns)
    clear = margins > 1e-6
    assert (np.array(compiled(logits, columns)) == expected)[clear].all()


def test_the_likeliest_token_is_the_first_of_equals() -> None:
    logits = torch.randn(7, 1003, generator=torch.Generator().manual_seed(5))
    assert torch.equal(likeliest(logits), logits.argmax(dim=-1))
    logits[2, [17, 400, 1002]] = 9.0
    logits[4] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 1002] = -5.0
    found = likeliest(logits)
    assert found.dtype == torch.int64
    assert found[[2, 4, 5]].tolist() == [17, 0, 1002]
    assert likeliest(logits[:0]).shape == (0,)
    assert torch.equal(likeliest(logits.t().contiguous().t()), found)
