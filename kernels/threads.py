"""Threads of numba beside those of torch."""

from __future__ import annotations
import torch


def use_torch_threads() -> int:
    count = torch.get_num_threads()
    try:
        import numba
    except ImportError:
        return count
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    return count
