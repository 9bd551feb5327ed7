"""Whether low-rank products by row are compiled here: tested once on small ones."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import numpy as np

from coppice.kernels.cpu.code import threads

_log = logging.getLogger(__name__)


@cache
def low_rank_kernels() -> ModuleType | None:
    """``low_rank_numba``; None where it does not work. Compiles it, or loads it from the cache."""
    threads.calm_waiting_threads()
    try:
        from coppice.kernels.cpu.layer.matmul import low_rank_numba

        _try_out(low_rank_numba)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.info("adapters are applied by torch: %s: %s", type(error).__name__, error)
        return None
    return low_rank_numba


def _try_out(kernels: ModuleType) -> None:
    """One row alone, and enough for several threads, in two groups of which one is empty."""
    width, out, rank = 64, 24, kernels.RANKS
    down = np.linspace(-1, 1, rank * width, dtype=np.float32).reshape(rank, width)
    up = np.linspace(1, -0.5, rank * out, dtype=np.float32).reshape(rank, out)
    table = kernels.piece_table([[], [[down.ctypes.data, up.ctypes.data, rank, 8, out]]])
    for count in (1, 520):
        x = np.linspace(-3, 3, count * width, dtype=np.float32).reshape(count, width)
        y = np.ones((count, 40), np.float32)
        expected = y.copy()
        expected[:, 8 : 8 + out] += x @ down.T @ up
        rows = np.arange(count)
        kernels.add_low_rank(x, y, rows, np.ones(count, np.int64), table, 2)
        if not np.allclose(y, expected, rtol=1e-4, atol=1e-3):
            raise ArithmeticError("the compiled kernels give wrong results")
