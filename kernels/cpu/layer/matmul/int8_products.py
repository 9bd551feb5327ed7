"""Int8 products on a CPU: by a compiled kernel where it has VNNI or AVX2, else by torch.

torch's product is ``torch._int_mm``, of oneDNN.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from coppice.kernels.cpu.code import processor, threads
from coppice.kernels.cpu.layer.rows import row_kernels

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.int8_panels import PackedInt8

_log = logging.getLogger(__name__)


def pack(weight: torch.Tensor) -> PackedInt8 | None:
    """An int8 weight ``[N, K]`` in the layout of the compiled product, a copy, O(N K).

    None without VNNI and AVX2, without numba, and where 4 does not divide K.
    """
    panels = panel_kernels()
    return None if panels is None else panels.pack(weight.numpy())


def multiply(
    x: torch.Tensor, weight: PackedInt8, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` float32 ``[T, K]`` times a packed weight, a new tensor ``[T, N]``.

    Each row of ``x`` is rounded to 127 levels of its largest number; ``scale`` ``[N]`` is that of
    the outputs divided by 127.
    """
    panels = panel_kernels()
    assert panels is not None
    return _multiply(panels, x, weight, scale, bias)


def multiply_plain(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``multiply`` with an int8 weight ``[N, K]`` that is not packed."""
    rows = row_kernels()
    levels, peaks = rows.quantize(x)
    return rows.rescale(torch._int_mm(levels, weight.t()), peaks, scale, bias)


@cache
def panel_kernels() -> ModuleType | None:
    """``int8_panels``, tested on small products; None where it does not work."""
    threads.calm_waiting_threads()
    processor.say_paths()
    try:
        from coppice.kernels.cpu.layer.matmul import int8_panels

        _try_out(int8_panels)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.info("int8 products are torch's: %s: %s", type(error).__name__, error)
        return None
    return int8_panels


def _multiply(
    panels: ModuleType,
    x: torch.Tensor,
    weight: PackedInt8,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    from coppice.kernels.cpu.layer.matmul.level_numba import multiply_rows

    x = x.contiguous()
    out = torch.empty(len(x), weight.out_features)
    if len(x):
        multiply_rows(
            panels.product(), x.numpy(), weight.address, scale.data_ptr(),
            0 if bias is None else bias.data_ptr(), out.numpy(), torch.get_num_threads(),
        )  # fmt: skip
    return out


def _try_out(panels: ModuleType) -> None:
    """Every number of rows that is compiled, over a whole panel and a part, alone and shared."""
    weight = (torch.arange((panels.PANEL + 1) * 8) % 255 - 127).to(torch.int8).view(-1, 8)
    packed = panels.pack(weight.numpy())
    scale = torch.linspace(0.5, 1, len(weight))
    for rows in (15, 8000):
        x = torch.linspace(-3, 3, rows * 8).view(rows, 8)
        got, expected = (
            _multiply(panels, x, packed, scale, scale),
            multiply_plain(x, weight, scale, scale),
        )
        if not torch.allclose(got, expected, rtol=1e-5):
            raise ArithmeticError("the compiled kernels give wrong results")
