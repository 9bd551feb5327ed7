"""Attention on a CPU, compiled: all tasks of a step over pages in float32, and over others.

``tasks`` has the work of a task.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types

from coppice.kernels.cpu.attention.arguments import Inputs, Items, Results
from coppice.kernels.cpu.attention.tasks import (
    FAST,
    FRAME,
    LANES,
    MOST_LANES,
    TILE,
    VECTORS,
    attention_frame,
    merge_share,
    work_tasks,
)
from coppice.kernels.cpu.code.calls import pointer, run_share, run_shares
from coppice.kernels.cpu.code.kept import cfunc, njit

__all__ = [
    "LANES",
    "MOST_LANES",
    "TILE",
    "VECTORS",
    "attend_items",
    "run_tasks",
    "tasks_address",
]


@cfunc(types.void(*[types.int64] * 3), fastmath=FAST, error_model="numpy")
def run_tasks(frame: int, begin: int, end: int) -> None:
    """Tasks ``begin .. end`` of what ``attention_frame`` has laid out, over pages in float32."""
    f = carray(pointer(frame), (FRAME,), np.int64)
    keys = carray(pointer(f[23]), (f[14],), np.float32)
    values = carray(pointer(f[24]), (f[14],), np.float32)
    work_tasks(frame, begin, end, keys, values)


@njit
def _attend(function: int, items: Items, inputs: Inputs, results: Results) -> None:
    frame = attention_frame(items, inputs, results)
    # Waking threads costs more than a small batch, so what is one share is worked right here.
    if len(items.shares) == 2:
        run_share(function, frame.ctypes.data, 0, len(items.tasks))
    else:
        run_shares(function, frame.ctypes.data, items.shares)
    frame[0] = 0  # numba frees an array after its last use by name, not by address
    merge_share(np.int64(0), len(items.merges), items, results)


def attend_items(items: Items, inputs: Inputs, results: Results) -> None:
    """Attend all rows of a step; O(keys of the items), in the threads of ``items.shares``."""
    function = tasks_address(inputs.keys.dtype == np.uint16)
    # Compiled code between here and there takes the address of pages alone.
    cache = (each.view(np.float32) for each in (inputs.keys, inputs.values))
    _attend(function, items, Inputs(inputs.queries, inputs.stride, *cache), results)


def tasks_address(half: bool) -> int:
    """The address of ``run_tasks``, for pages in float32 or in bfloat16."""
    if half:
        from coppice.kernels.cpu.attention import half_items  # compiled when imported

        return int(half_items.run_tasks.address)
    return int(run_tasks.address)
