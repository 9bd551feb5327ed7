"""Products of float32 rows with weights of 16 bits, as a call for compiled code.

``half_panels`` has the product of a panel, which is called by its address.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from coppice.kernels.row_blocks import lay_rows
from coppice.kernels.tasks_numba import run_share, run_shares
from coppice.kernels.vector_code import ROWS

#: A digest of ``row_blocks.py``, ``vector_code.py`` and ``tasks_numba.py``; see ``items_numba``.
SOURCES = "3c09c58586e0"

# Multiplications from which panels are shared among threads: below, waking them takes longer.
_SHARED_FROM = 1 << 19
# Bytes of rows that are worked together, for the second-level cache to hold them for all panels.
_TOGETHER = 600_000


@njit(cache=True)
def multiply_rows(
    function: int,
    panel: int,
    float16: int,
    x: np.ndarray,
    weight: int,
    bias: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """``out`` float32 ``[T, N]`` = ``x`` float32 ``[T, K]`` times a packed weight, plus bias.

    ``function`` is the address of ``half_panels.run_panels``, ``panel`` the outputs of a panel,
    ``weight`` the address of a packed one, of bfloat16 where ``float16`` is 0, and ``bias`` that of
    float32 ``[N]`` or 0.
    """
    rows, inner = x.shape
    width = out.shape[1]
    panels = -(-width // panel)
    frame = np.empty(8, np.int64)
    frame[1], frame[2], frame[4], frame[5] = inner, width, weight, bias
    frame[7] = float16
    cuts = np.empty(threads + 1, np.int64)
    for i in range(threads + 1):
        cuts[i] = panels * i // threads
    blocks = -(-rows // ROWS)
    parts = min(-(-4 * rows * inner // _TOGETHER), blocks)
    laid = np.empty(min((blocks // parts + 1) * ROWS, rows) * inner if rows > 1 else 1, np.float32)
    for part in range(parts):
        begin = part * blocks // parts * ROWS
        end = min((part + 1) * blocks // parts * ROWS, rows)
        frame[0] = end - begin
        frame[3], frame[6] = x[begin:].ctypes.data, out[begin:].ctypes.data
        if end - begin > 1:
            lay_rows(end - begin, frame[3], inner, laid.ctypes.data, threads)
            frame[3] = laid.ctypes.data
        if (end - begin) * inner * width < _SHARED_FROM or threads <= 1:
            run_share(function, frame.ctypes.data, 0, panels)
        else:
            run_shares(function, frame.ctypes.data, cuts)
    # Numba frees what is not named any more, and addresses are no names.
    frame[0], cuts[0], laid[0] = 0, 0, 0
