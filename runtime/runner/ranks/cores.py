"""Which cores each rank computes on: those of this process, divided so that no two share one."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_NODES = Path("/sys/devices/system/node")


def divided_cores(size: int) -> list[list[int]] | None:
    """The cores of each rank; None where they are too few, or where threads can't be bound.

    Neighbours are cores of the same NUMA node, so that a rank's memory is near to it.
    """
    if size < 2 or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (_node_of().get(core, 0), core))
    if len(cores) < size:
        return None
    count = len(cores)
    return [cores[count * rank // size : count * (rank + 1) // size] for rank in range(size)]


def _node_of() -> dict[int, int]:
    """The NUMA node of each core, as far as the system says."""
    found = {}
    for folder in _NODES.glob("node[0-9]*"):
        try:
            text = (folder / "cpulist").read_text(encoding="ascii")
        except OSError:
            continue
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            for core in range(int(first), int(last or first) + 1) if first else ():
                found[core] = int(folder.name[4:])
    return found


def take_cores(cores: list[int] | None) -> None:
    """Binds this thread and those that it will start to some cores; torch has a thread for each."""
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


def give_back_cores(cores: set[int], threads: int) -> None:
    """Binds this thread to the cores that it had before, and gives torch its threads back."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
