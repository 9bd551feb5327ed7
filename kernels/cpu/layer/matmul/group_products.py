"""Products of weights in groups on a CPU: compiled where it has VNNI or AVX2, else torch's.

torch's product decodes the weight each time: it is right and slow.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from coppice.kernels.cpu.code import processor, threads
from coppice.kernels.cpu.layer.matmul.grouped import BLOCK, Grouped, rounded

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.group_panels import PackedGroups

_log = logging.getLogger(__name__)

# Rows in each of torch's products: with their number it chooses the order of sums.
_TOGETHER = 32


def pack(weight: Grouped) -> PackedGroups | None:
    """A weight ``[N, K]`` in the layout of the compiled product, a copy, O(N K).

    None without VNNI and AVX2, without numba, and where ``BLOCK`` does not divide a group.
    """
    panels = group_kernels()
    return None if panels is None else panels.pack(weight)


def multiply(
    x: torch.Tensor, weight: PackedGroups, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` float32 ``[T, K]`` times a packed weight, a new tensor ``[T, N]``.

    What a row of ``x`` has for a group is rounded to 127 levels of its largest number; ``scale``
    float32 ``[N]`` is what the products are multiplied by.
    """
    panels = group_kernels()
    assert panels is not None
    return _multiply(panels, x, weight, scale, bias)


def multiply_plain(
    x: torch.Tensor, weight: Grouped, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``multiply`` with a weight that is not packed."""
    numbers = weight.numbers().mul_(scale[:, None])
    count = len(x)
    rows = x.new_zeros(-(-count // _TOGETHER) * _TOGETHER, x.shape[1])
    chunks = x.unflatten(1, (-1, weight.group))
    factors = chunks.abs().amax(2, keepdim=True).clamp_(min=1e-30) / 127
    rows[:count] = (chunks / factors).round_().mul_(factors).flatten(1)
    parts = [F.linear(part, numbers, bias) for part in rows.split(_TOGETHER)]
    return torch.cat(parts)[:count] if parts else x.new_zeros(0, len(numbers))


@cache
def group_kernels() -> ModuleType | None:
    """``group_panels``, tested on small products; None where it does not work."""
    threads.calm_waiting_threads()
    processor.say_paths()
    try:
        from coppice.kernels.cpu.layer.matmul import group_panels

        _try_out(group_panels)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.warning("int4 products are torch's, and slow: %s: %s", type(error).__name__, error)
        return None
    return group_panels


def _multiply(
    panels: ModuleType,
    x: torch.Tensor,
    weight: PackedGroups,
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
    weight = torch.linspace(-1, 1, (panels.PANEL + 1) * 64).sin_().view(-1, 64)
    scale = torch.linspace(0.5, 1, len(weight))
    for bits, rows in ((4, 15), (8, 15), (4, 1000)):
        made = rounded(weight, bits, BLOCK)
        packed = panels.pack(made)
        x = torch.linspace(-3, 3, rows * 64).view(rows, 64)
        got = _multiply(panels, x, packed, scale, scale)
        # Factors of float16 differ from those of float32.
        if not torch.allclose(got, multiply_plain(x, made, scale, scale), rtol=1e-2, atol=5e-2):
            raise ArithmeticError("the compiled kernels give wrong results")
