"""How the ranks of a model speak with each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from coppice.kernels.cpu.ranks.memory import RankMemory


class RankGroup(ABC):
    """One rank among all that compute a model, by their numbers from 0 on.

    Except for messages, ``end`` and ``close`` all ranks make the same calls in the same order. A
    call raises an error when the group has ended.

    Attributes:
        rank, size: this rank, and how many there are.
        local_size: how many of them share the memory of this one's device.
        memory: what they share on one machine, for the compiled layers; None: nothing.
    """

    rank: int
    size: int
    local_size: int = 1
    memory: RankMemory | None = None

    @abstractmethod
    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself, which becomes the sum of all ranks', with the same bits on each."""

    @abstractmethod
    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """The columns of all ranks, float32 ``[R, sum of widths]``, of ``part [R, own width]``.

        Only on the first rank; on the others ``part`` itself.
        """

    @abstractmethod
    def share(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself, which becomes the first rank's."""

    @abstractmethod
    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Sends a message from the first rank to all others."""

    @abstractmethod
    def receive(self) -> bytes:
        """The next message of the first rank."""

    @property
    def ended(self) -> str | None:
        """Why the group has ended; None while it works."""
        return None

    @abstractmethod
    def end(self, reason: str) -> None:
        """Ends the group, so that no rank waits for another; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Ends the group and gives back what it holds, processes of other ranks among it."""


class _Alone(RankGroup):
    """The only rank of a model, which has all of it."""

    rank, size = 0, 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return part

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def least(self, number: int) -> int:
        return number

    def send(self, message: bytes) -> None:
        raise AssertionError("there is no other rank")

    def receive(self) -> bytes:
        raise AssertionError("there is no other rank")

    def end(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


#: The group of a model that is not divided.
ALONE: RankGroup = _Alone()
