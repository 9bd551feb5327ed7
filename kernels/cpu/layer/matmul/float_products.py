"""Products of float32 rows with float weights on a CPU, where they can be compiled."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from coppice.kernels.cpu.code import processor, threads

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.float_panels import PackedFloat

_log = logging.getLogger(__name__)


def pack(weight: torch.Tensor, *, pairs: bool = False) -> PackedFloat | None:
    """A weight ``[N, K]`` of 16 bits or float32 in the layout of the product, a copy, O(N K).

    ``pairs``, of a bfloat16 weight: rows are rounded to bfloat16, too. None where there are no
    compiled products (of pairs: of AVX512-BF16), and where K is odd.
    """
    panels = float_kernels()
    if panels is None or (pairs and not multiplies_pairs()):
        return None
    packed: PackedFloat | None = panels.pack(weight, pairs=pairs)
    return packed


def multiplies_pairs() -> bool:
    """Whether there are compiled products of pairs of bfloat16 here (AVX512-BF16)."""
    panels = float_kernels()
    return panels is not None and bool(panels.HAS_PAIRS)


def multiply(x: torch.Tensor, weight: PackedFloat, bias: torch.Tensor | None) -> torch.Tensor:
    """``x`` float32 ``[T, K]`` times a packed weight plus bias ``[N]``, new, float32 ``[T, N]``."""
    panels = float_kernels()
    assert panels is not None
    return _multiply(panels, x, weight, bias)


def rows_of(weight: PackedFloat, indices: torch.Tensor) -> torch.Tensor:
    """Rows of a packed weight in its own type, ``[T, K]``, for int64 ``indices [T]``.

    Each number of a row lies in another cache line, those in pairs two by two: some 0.2
    microseconds for 100 features of a row, where a step takes milliseconds.
    """
    memory = weight.memory
    if memory.dim() == 4:  # pairs of bfloat16: one is moved as one number
        pairs = memory.view(torch.int32)[:, : weight.in_features // 2, :, 0]
        panel = pairs.shape[-1]
        return pairs[indices // panel, :, indices % panel].view(memory.dtype)
    panel = memory.shape[-1]
    return memory[indices // panel, :, indices % panel]


@cache
def float_kernels() -> ModuleType | None:
    """``float_panels``, tested on small products; None where it does not work."""
    threads.calm_waiting_threads()
    processor.say_paths()
    try:
        from coppice.kernels.cpu.layer.matmul import float_panels

        _try_out(float_panels)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.info("products are torch's, and weights float32: %s: %s", type(error).__name__, error)
        return None
    return float_panels


def _multiply(
    panels: ModuleType, x: torch.Tensor, weight: PackedFloat, bias: torch.Tensor | None
) -> torch.Tensor:
    from coppice.kernels.cpu.layer.matmul.float_numba import multiply_rows

    x = x.contiguous()
    out = torch.empty(len(x), weight.out_features)
    if len(x):
        multiply_rows(
            panels.product(weight.kind), x.numpy(), weight.address,
            0 if bias is None else bias.data_ptr(), out.numpy(), torch.get_num_threads(),
        )  # fmt: skip
    return out


def _try_out(panels: ModuleType) -> None:
    """Every number of rows that is compiled, over a whole panel and a part, alone and shared."""
    for rows, kind in (*((15, kind) for kind in panels.KINDS), (8000, torch.bfloat16)):
        weight = torch.linspace(-1, 1, (panels.PANEL + 1) * 8).to(kind).view(-1, 8)
        packed, bias = panels.pack(weight), torch.linspace(0.5, 1, len(weight))
        x = torch.linspace(-3, 3, rows * 8).view(rows, 8)
        expected = torch.addmm(bias, x, weight.float().t())
        if not torch.allclose(_multiply(panels, x, packed, bias), expected, atol=1e-5):
            raise ArithmeticError("the compiled kernels give wrong results")
        if kind == torch.bfloat16 and panels.HAS_PAIRS:
            expected = torch.addmm(bias, x.bfloat16().float(), weight.float().t())
            packed = panels.pack(weight, pairs=True)
            if not torch.allclose(_multiply(panels, x, packed, bias), expected, atol=1e-5):
                raise ArithmeticError("the products of pairs give wrong results")
