"""Int8 products of float32 rows, as a call for compiled code: quantize, multiply, rescale.

``int8_panels`` has the product of a panel, which is called by its address.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from coppice.kernels.row_blocks import lay_rows
from coppice.kernels.rows_numba import SHARED_FROM, quantize_share, quantize_shares
from coppice.kernels.tasks_numba import run_share, run_shares

#: A digest of ``row_blocks.py``, ``vector_code.py``, ``rows_numba.py`` and ``tasks_numba.py``; see
#: ``items_numba``.
SOURCES = "cbab1f5d0f9d"

# Multiplications from which panels are shared among threads: below, waking them takes longer.
_SHARED_FROM = 1 << 19


@njit(cache=True)
def multiply_rows(
    function: int,
    panel: int,
    x: np.ndarray,
    weight: int,
    scale: int,
    bias: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """``out`` float32 ``[T, N]`` = ``x`` float32 ``[T, K]`` times a packed weight, plus bias.

    ``function`` is the address of ``int8_panels.run_panels``, ``panel`` the outputs of a panel. A
    row of ``x`` is taken in 127 levels of its largest. ``weight`` is the address of a packed one,
    ``scale`` that of float32 ``[N]``, of each output and divided by 127; ``bias``'s may be 0.
    """
    rows, inner = x.shape
    width = out.shape[1]
    levels, peaks = np.empty((rows, inner), np.int8), np.empty(rows, np.float32)
    shares = min(rows, threads) if x.size >= SHARED_FROM else 1
    if shares <= 1:
        quantize_share(np.int64(0), rows, x, np.int32(128), levels, peaks)
    else:
        quantize_shares(shares, x, np.int32(128), levels, peaks)
    laid = levels
    if rows > 1:
        laid = np.empty((rows, inner), np.int8)
        lay_rows(rows, levels.ctypes.data, inner // 4, laid.ctypes.data, threads)
    frame = np.empty(9, np.int64)
    frame[0], frame[1], frame[2] = rows, inner, width
    frame[3], frame[4], frame[5] = laid.ctypes.data, peaks.ctypes.data, weight
    frame[6], frame[7], frame[8] = scale, bias, out.ctypes.data
    panels = -(-width // panel)
    if rows * inner * width < _SHARED_FROM or threads <= 1:
        run_share(function, frame.ctypes.data, 0, panels)
    else:
        cuts = np.empty(threads + 1, np.int64)
        for i in range(threads + 1):
            cuts[i] = panels * i // threads
        run_shares(function, frame.ctypes.data, cuts)
    # Numba frees what is not named any more, and addresses are no names.
    laid[0, 0], peaks[0], frame[0] = 0, 0, 0
