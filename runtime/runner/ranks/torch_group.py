"""Ranks that speak through torch.distributed: GPUs by NCCL, CPUs of several machines by Gloo."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from coppice.runtime.runner.ranks.ending import EndingGroup

if TYPE_CHECKING:  # it loads compiled code, which engines of one rank do not need
    from coppice.kernels.cpu.ranks.memory import RankMemory


# How long a rank waits for a message: an engine may have nothing to do, or sleep, for days.
_PATIENCE = timedelta(days=365)


class TorchGroup(EndingGroup):
    """A rank of torch's default process group; see ``RankGroup``.

    Messages go through ``mailbox``, memory that ranks on one machine share, or else through Gloo.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        held: ExitStack,
        *,
        init_method: str = "env://",
        mailbox: RankMemory | None = None,
        in_order: bool = False,
    ) -> None:
        """Joins the group; waits for all ranks. ``init_method`` as torch.distributed takes it.

        ``held`` has what was started for the group. With ``in_order`` sums are added in the order
        of the ranks: that of NCCL and Gloo depends on how many numbers there are.
        """
        super().__init__(rank, size, mailbox, held)
        self._mailbox = mailbox
        if device.type == "cpu":
            self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
        held.callback(dist.destroy_process_group)
        self._messages = (
            dist.new_group(backend="gloo", timeout=_PATIENCE) if mailbox is None else None
        )
        self._in_order = in_order and size > 2  # of two there is one order

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self._in_order:
            own = x.contiguous()
            parts = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(parts, own)
            x.copy_(parts[0])
            for part in parts[1:]:
                x += part
            return x
        if x.is_contiguous():
            dist.all_reduce(x)
            return x
        own = x.contiguous()
        dist.all_reduce(own)
        return x.copy_(own)

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        rows, most = len(part), max(widths)
        padded = part.new_zeros(rows, most)
        padded[:, : part.shape[1]] = part
        if self.rank:
            dist.gather(padded, None, dst=0)
            return part
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts, dst=0)
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], 1)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, 0)
        return x

    def least(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def send(self, message: bytes) -> None:
        if self._mailbox is not None:
            self._mailbox.send(message)
            return
        dist.broadcast(torch.tensor(len(message)), 0, self._messages)
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(content, 0, self._messages)

    def receive(self) -> bytes:
        if self._mailbox is not None:
            return self._mailbox.receive()
        length = torch.tensor(0)
        dist.broadcast(length, 0, self._messages)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, 0, self._messages)
        return message.numpy().tobytes()
