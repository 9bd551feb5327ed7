"""The compiled kernel over pages in bfloat16, a module of its own: it is compiled when imported.

The runner imports it, with this cache, and no one else pays for it.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types

from coppice.kernels.cpu.attention.tasks import FAST, FRAME, work_tasks
from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.kept import cfunc

__all__ = ["run_tasks"]


@cfunc(types.void(*[types.int64] * 3), fastmath=FAST, error_model="numpy")
def run_tasks(frame: int, begin: int, end: int) -> None:
    """Tasks ``begin .. end``, as ``numba_items.run_tasks``, over pages in bfloat16."""
    f = carray(pointer(frame), (FRAME,), np.int64)
    keys = carray(pointer(f[23]), (f[14],), np.uint16)
    values = carray(pointer(f[24]), (f[14],), np.uint16)
    work_tasks(frame, begin, end, keys, values)
