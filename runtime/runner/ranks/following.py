"""How the first rank of a divided model has the others do what it does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Protocol

import torch

from coppice.kernels.cpu.ranks.errors import RanksEnded
from coppice.runtime.model.parallel.group import RankGroup

# What the others are told to do, beside methods of theirs by name.
_COMPUTE, _LOGITS, _LEAVE = "_compute", "_logits", "_leave"

Head = Callable[[torch.Tensor], torch.Tensor]
"""Makes the logits of rows of hidden states."""


class Followers:
    """The other ranks, as the first one sees them. On another rank, and alone, it has none."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._there = group.size > 1 and group.rank == 0

    def tell(self, method: str, *args: Any) -> None:
        """Has the others' runners call a method of theirs, as this one does now."""
        if self._there:
            self._group.send(pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL))

    def compute(self, *args: Any) -> None:
        """Has the others compute a batch, with their runners' `compute_part`."""
        self.tell(_COMPUTE, *args)

    def head_of(self, hidden: torch.Tensor, logits: Head) -> Head:
        """The head for rows of `hidden`, in which all ranks take part; `logits` is this rank's."""
        if self._group.size == 1:
            return logits

        def head(rows: torch.Tensor) -> torch.Tensor:
            first = (rows.storage_offset() - hidden.storage_offset()) // hidden.stride(0)
            self.tell(_LOGITS, first, len(rows))
            return logits(rows)

        return head

    def leave(self) -> None:
        """Ends the others' `take_part`."""
        self.tell(_LEAVE)


class Follower(Protocol):
    """The runner of another rank than the first."""

    group: RankGroup
    decoder: Any

    def compute_part(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Its part of a batch; hidden states of the rows with which more may be done."""


@torch.inference_mode()
def take_part(runner: Follower) -> None:
    """Does what the first rank's runner does, until the group ends; on the other ranks.

    Raises what fails, and when the group has ended.
    """
    hidden: torch.Tensor | None = None
    while True:
        method, args = pickle.loads(runner.group.receive())
        if method == _COMPUTE:
            hidden = runner.compute_part(*args)
        elif method == _LOGITS:
            first, count = args
            assert hidden is not None
            runner.decoder.logits(hidden[first : first + count])
        elif method == _LEAVE:
            raise RanksEnded("the engine was closed")
        else:
            getattr(runner, method)(*args)
