"""Which launches overlap, and that each kernel of such a launch waits first."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
import triton.language as tl

from coppice.kernels.sampling import choose_triton
from coppice.kernels.triton import (
    attention,
    cache,
    dependent,
    experts,
    levels,
    merge,
    products,
    rows,
)

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget():
    dependent.dependent.cache_clear()
    yield
    dependent.dependent.cache_clear()


@pytest.mark.parametrize(("capability", "on"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_a_chip_that_has_it(monkeypatch, capability, on):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dependent, "offered", lambda: True)
    expected = {"DEPENDENT": True, "launch_pdl": True} if on else {"DEPENDENT": False}
    assert dependent.dependent(CUDA) == expected
    assert dependent.dependent(torch.device("cpu")) == {"DEPENDENT": False}


def test_a_triton_that_lacks_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(tl.extra, "cuda", None)
    assert not dependent.offered()
    assert dependent.dependent(CUDA) == {"DEPENDENT": False}


@pytest.mark.parametrize(
    "module", [attention, cache, choose_triton, experts, levels, merge, products, rows]
)
def test_every_program_waits_first(module):
    """A program that returned before would let the next kernel overtake the one before."""
    found = 0
    for each in ast.parse(inspect.getsource(module)).body:
        if not isinstance(each, ast.FunctionDef):
            continue
        if "DEPENDENT" in [argument.arg for argument in each.args.args]:
            found += 1
            first = each.body[1] if ast.get_docstring(each) else each.body[0]
            assert ast.unparse(first) == "begin(DEPENDENT)", each.name
    assert found
