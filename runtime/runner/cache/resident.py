"""Main memory for the first pages of the KV cache before a step writes to them.

The system gives main memory for what is written for the first time, and stops the thread that
writes meanwhile. In a virtual machine, whose own memory may be given to it only then, that took a
sixth of the time of long prompts until all pages had been used once. All threads together ask for
it at the start in a quarter of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from coppice.kernels.cpu.code.memory import populate

# Bytes that get memory at the start, of all tensors together: an idle cache takes no more.
_MOST = 1 << 30


def populate_first(tensors: Sequence[torch.Tensor], most: int = _MOST) -> int:
    """Sees to memory for the first pages, of up to ``most`` bytes; how many pages have it.

    ``tensors`` have pages as their first dimension, and lie in main memory. Pools give away the
    first pages first. 0 where the system cannot be asked: pages get their memory as they are
    written then. Numbers stay as they are.
    """
    pages = min((len(each) for each in tensors), default=0)
    size = max(sum(each.nbytes for each in tensors), 1)
    first = min(most * pages // size, pages)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        done = list(threads.map(populate, [each[:first] for each in tensors]))
    return first if all(done) else 0
