"""Ranks on the CPU of one machine, which meet in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import torch

from coppice.runtime.runner.ranks.ending import EndingGroup

if TYPE_CHECKING:  # it loads compiled code, which engines of one rank do not need
    from coppice.kernels.cpu.ranks.memory import RankMemory


class SharedGroup(EndingGroup):
    """A rank with the memory that it shares with the others; see ``RankGroup``."""

    memory: RankMemory

    def __init__(self, memory: RankMemory, rank: int, size: int, held: ExitStack) -> None:
        """``held`` has what was started for the group."""
        super().__init__(rank, size, memory, held)
        self.memory = memory
        self.local_size = size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32 and x.is_contiguous():
            self.memory.sum(x.detach().view(-1).numpy())
            return x
        wide = x.float().contiguous()
        self.memory.sum(wide.view(-1).numpy())
        return x.copy_(wide)

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        found = self.memory.gather(part.detach().numpy(), widths)
        return part if found is None else torch.from_numpy(found)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        own = np.ascontiguousarray(x.numpy())
        self.memory.share(own)
        return x.copy_(torch.from_numpy(own))

    def least(self, number: int) -> int:
        return self.memory.least(number)

    def send(self, message: bytes) -> None:
        self.memory.send(message)

    def receive(self) -> bytes:
        return self.memory.receive()
