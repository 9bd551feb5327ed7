"""Products of float32 rows with weights of 16 bits on a CPU, where they can be compiled."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from coppice.kernels import threads

if TYPE_CHECKING:
    from coppice.kernels.half_panels import PackedHalf

_log = logging.getLogger(__name__)


def pack(weight: torch.Tensor) -> PackedHalf | None:
    """A bfloat16 or float16 weight ``[N, K]`` as the product wants it, a copy, O(N K).

    None where ``half_kernels`` gives None, and where K is odd.
    """
    panels = half_kernels()
    packed: PackedHalf | None = None if panels is None else panels.pack(weight)
    return packed


def multiply(x: torch.Tensor, weight: PackedHalf, bias: torch.Tensor | None) -> torch.Tensor:
    """``x`` float32 ``[T, K]`` times a packed weight plus bias ``[N]``, new, float32 ``[T, N]``."""
    panels = half_kernels()
    assert panels is not None
    return _multiply(panels, x, weight, bias)


@cache
def half_kernels() -> ModuleType | None:
    """``half_panels``, tried on small products; None where it does not work."""
    threads.calm_waiting_threads()
    try:
        from coppice.kernels import half_panels

        _try_out(half_panels)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.info("weights of 16 bits become float32: %s: %s", type(error).__name__, error)
        return None
    return half_panels


def _multiply(
    panels: ModuleType, x: torch.Tensor, weight: PackedHalf, bias: torch.Tensor | None
) -> torch.Tensor:
    from coppice.kernels.half_numba import multiply_rows

    x = x.contiguous()
    out = torch.empty(len(x), weight.out_features)
    if len(x):
        multiply_rows(
            panels.run_panels.address, panels.PANEL, int(weight.float16), x.numpy(),
            weight.address, 0 if bias is None else bias.data_ptr(), out.numpy(),
            torch.get_num_threads(),
        )  # fmt: skip
    return out


def _try_out(panels: ModuleType) -> None:
    """Every number of rows that is compiled, over a whole panel and a part, alone and shared."""
    for rows, kind in ((15, torch.bfloat16), (15, torch.float16), (8000, torch.bfloat16)):
        weight = torch.linspace(-1, 1, (panels.PANEL + 1) * 8).to(kind).view(-1, 8)
        packed, bias = panels.pack(weight), torch.linspace(0.5, 1, len(weight))
        x = torch.linspace(-3, 3, rows * 8).view(rows, 8)
        expected = torch.addmm(bias, x, weight.float().t())
        if not torch.allclose(_multiply(panels, x, packed, bias), expected, atol=1e-5):
            raise ArithmeticError("the compiled kernels give wrong results")
