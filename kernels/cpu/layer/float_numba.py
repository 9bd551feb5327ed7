"""Products of float32 rows with float weights, as calls for compiled code.

``float_panels`` has the product of a panel, which is called by its address.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from coppice.kernels.cpu.code.calls import run_share
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.simd import ROWS
from coppice.kernels.cpu.code.team import came_together, gathered, meet, new_team
from coppice.kernels.cpu.layer.row_blocks import lay_share

# Multiplications from which panels are shared among threads: below, waking them takes longer.
_SHARED_FROM = 1 << 19
# Bytes of rows that are worked together, for the second-level cache to hold them for all panels.
_TOGETHER = 600_000


@njit
def _parts(rows: int, inner: int) -> int:
    """How many parts of the rows are worked one after the other."""
    return max(min(-(-4 * rows * inner // _TOGETHER), -(-rows // ROWS)), 1)


@njit
def laid_numbers(rows: int, inner: int) -> int:
    """Float32 numbers in which ``multiply_share`` lays down up to ``rows`` rows of ``inner``."""
    # A part has that many blocks, what is left of a block, and one as blocks do not divide.
    most = _TOGETHER // (4 * inner * ROWS) + 3
    return min(most * ROWS, rows) * inner


@njit
def multiply_share(
    me: int,
    threads: int,
    team: int,
    met: int,
    function: int,
    panel: int,
    kind: int,
    x: np.ndarray,
    weight: int,
    bias: int,
    out: np.ndarray,
    laid: np.ndarray,
) -> int:
    """What thread ``me`` of a team does of ``multiply_rows``, until all are through.

    ``met`` and what it returns are as ``meet`` has them. ``laid``, float32 of ``laid_numbers`` or
    more, is theirs in common.
    """
    rows, inner = x.shape
    width = out.shape[1]
    panels = -(-width // panel)
    frame = np.empty(8, np.int64)
    frame[1], frame[2], frame[4], frame[5] = inner, width, weight, bias
    frame[7] = kind
    blocks, parts = -(-rows // ROWS), _parts(rows, inner)
    for part in range(parts):
        first, last = part * blocks // parts, (part + 1) * blocks // parts
        begin, end = first * ROWS, min(last * ROWS, rows)
        frame[0] = end - begin
        frame[3], frame[6] = x[begin:].ctypes.data, out[begin:].ctypes.data
        if end - begin > 1:
            one = (last - first) * me // threads * ROWS
            other = min((last - first) * (me + 1) // threads * ROWS, end - begin)
            lay_share(one, other, frame[3], inner, laid.ctypes.data)
            met = meet(team, threads, met)
            frame[3] = laid.ctypes.data
        address = frame.ctypes.data
        run_share(function, address, panels * me // threads, panels * (me + 1) // threads)
        met = meet(team, threads, met)
    # Numba frees what is not named any more, and addresses are no names.
    frame[0] = 0
    return met


@njit(parallel=True)
def _multiply_shares(
    threads: int,
    team: int,
    function: int,
    panel: int,
    kind: int,
    x: np.ndarray,
    weight: int,
    bias: int,
    out: np.ndarray,
    laid: np.ndarray,
) -> None:
    for me in prange(threads):
        if gathered(team, threads):
            multiply_share(
                me, threads, team, 0, function, panel, kind, x, weight, bias, out, laid
            )  # fmt: skip


@njit
def multiply_rows(
    function: int,
    panel: int,
    kind: int,
    x: np.ndarray,
    weight: int,
    bias: int,
    out: np.ndarray,
    threads: int,
) -> None:
    """``out`` float32 ``[T, N]`` = ``x`` float32 ``[T, K]`` times a packed weight, plus bias.

    ``function`` is the address of ``float_panels.run_panels``, ``panel`` the outputs of a panel,
    ``weight`` the address of a packed one of that ``kind`` (a place in its ``KINDS``), and ``bias``
    that of float32 ``[N]`` or 0.
    """
    rows, inner = x.shape
    laid = np.empty(laid_numbers(rows, inner) if rows > 1 else 0, np.float32)
    team = new_team()
    address = team.ctypes.data
    if rows * inner * out.shape[1] >= _SHARED_FROM and threads > 1:
        _multiply_shares(
            threads, address, function, panel, kind, x, weight, bias, out, laid
        )  # fmt: skip
        if came_together(team):
            return
    multiply_share(0, 1, address, 0, function, panel, kind, x, weight, bias, out, laid)
