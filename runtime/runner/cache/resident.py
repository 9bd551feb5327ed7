"""Main memory for the first pages of the KV cache before a step writes to them.

The system gives main memory for what is written for the first time, and stops the thread that
writes meanwhile. In a virtual machine, whose own memory may be given to it only then, that took a
sixth of the time of long prompts until all pages had been used once. Here it is asked for in the
background, as soon as there are pages, while a server starts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from coppice.kernels.cpu.code.memory import populate

# Bytes that get memory beforehand, of all tensors together: an idle cache takes no more.
_MOST = 1 << 30
# Bytes that are asked for at a time.
_TOGETHER = 8 << 20


class ResidentPages:
    """A thread that sees to memory for the first pages; pools give away the first ones first.

    ``tensors`` have pages as their first dimension, and lie in main memory. Where the system cannot
    be asked, pages get their memory as they are written.

    Attributes:
        pages: that have memory by now.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], most: int = _MOST) -> None:
        self.pages = 0
        self._tensors = tensors
        self._stopped = False
        pages = min((len(each) for each in tensors), default=0)
        size = max(sum(each.nbytes for each in tensors), 1)
        self._until = min(most * pages // size, pages)
        self._together = max(_TOGETHER * pages // size, 1)
        self._thread = threading.Thread(target=self._run, name="pages' memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for begin in range(0, self._until, self._together):
            end = min(begin + self._together, self._until)
            for each in self._tensors:
                if self._stopped or not populate(each[begin:end]):
                    return
            self.pages = end

    def stop(self) -> None:
        """Lets go of the tensors."""
        self._stopped = True
        self._thread.join()
        self._tensors = ()
