"""How ranks meet in compiled code: each waits until all have come, and adds what all have made.

Ranks are processes, or threads of one, each with a part of a model's weights. They share memory:

    int64 places, each in its own cache line: the count of arrivals at meetings, messages that were
      sent and taken, and for each the number of threads that sleep until it changes; whether it is
      over
    room for one message
    for each rank two regions, which it fills in turn: what it brings to a meeting

A rank writes to its region, all meet, and each adds the regions in the order of the ranks, so that
all have the same sums, bit for bit. It fills its other region before the next meeting. When it
comes back to the first one, all have come to that meeting, and so have read this region.

A call's ``ranks`` is an int64 array of ``FIELDS``; one of no numbers stands for a rank alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from coppice.kernels.cpu.code.atomics import (
    LOOKS,
    SHARED,
    SLEEPS,
    count,
    nap,
    pause,
    read,
    sleep_while,
    wake,
)
from coppice.kernels.cpu.code.calls import pointer
from coppice.kernels.cpu.code.kept import njit

#: What a call's ``ranks`` has: the address of the shared places, the rank, how many there are, the
#: address of the regions and the bytes of each; arrivals of all meetings so far; of norms over all
#: heads the width of all queries and of all keys, and whether this rank adds its keys to the sum.
FIELDS = (
    "places", "rank", "size", "regions", "region_bytes", "came", "queries", "keys", "adds_keys",
)  # fmt: skip
_PLACES, _RANK, _RANKS, _REGIONS, _BYTES, _CAME, _QUERIES, _KEYS, _ADDS = range(len(FIELDS))

#: Places, int64: three counts, each followed by the number of its sleepers; the bytes of the
#: message; whether it is over.
ARRIVED, SENT, TAKEN, LENGTH, OVER, PLACES = 0, 32, 64, 96, 112, 128
_SLEEPING = 16
# Added to all counts when it is over: nobody waits any more. Its low half changes that of a count,
# which is all that `sleep_while` compares: who is about to sleep does not.
_FOREVER = (1 << 61) + 1


@njit(nogil=True)
def wait_for(address: int, goal: int) -> None:
    """Waits until the count at ``address`` is at least ``goal``."""
    for _ in range(LOOKS):
        if read(address) >= goal:
            return
        pause()
    if not SLEEPS:
        while read(address) < goal:
            nap()
        return
    count(address + 8 * _SLEEPING, 1)
    while True:
        come = read(address)
        if come >= goal:
            break
        sleep_while(address, come, SHARED)
    count(address + 8 * _SLEEPING, -1)


@njit(nogil=True)
def raise_count(address: int, more: int) -> int:
    """Adds to the count at ``address``, wakes who waits for it, and returns what it was."""
    was = count(address, more)
    if SLEEPS and read(address + 8 * _SLEEPING):
        wake(address, SHARED)
    return was


@njit(nogil=True)
def end_all(places: int) -> None:
    """Lets all waits of all ranks end, now and for ever; what they compute then is worthless."""
    if count(places + 8 * OVER, 1):
        return
    for place in (ARRIVED, SENT, TAKEN):
        raise_count(places + 8 * place, _FOREVER)


@njit
def meet_ranks(me: int, ranks: np.ndarray, came: int) -> int:
    """Waits for all ranks, and sees what they have written; the new ``came``.

    ``came`` is ``ranks[_CAME]`` at first, then the result of the meeting before. All threads of a
    rank's team call it, after they have met; ``me`` is the thread's number.
    """
    goal = came + ranks[_RANKS]
    address = ranks[_PLACES] + 8 * ARRIVED
    if me == 0 and count(address, 1) == goal - 1:
        if SLEEPS and read(address + 8 * _SLEEPING):
            wake(address, SHARED)
        return goal
    wait_for(address, goal)
    return goal


@njit
def region_of(ranks: np.ndarray, rank: int, came: int) -> int:
    """The address of a rank's region for the meeting that follows ``came`` arrivals."""
    turn = came // ranks[_RANKS] % 2
    return ranks[_REGIONS] + (2 * rank + turn) * ranks[_BYTES]


@njit
def brought(ranks: np.ndarray, rank: int, came: int, rows: int, width: int) -> Any:
    """A rank's region as float32 ``[rows, width]``, see ``region_of``."""
    return carray(pointer(region_of(ranks, rank, came)), (rows, width), np.float32)


@njit(fastmath={"contract"})
def sum_share(begin: int, end: int, ranks: np.ndarray, came: int, out: np.ndarray) -> None:
    """Rows ``begin .. end`` of ``out`` = those of all regions, added in the order of the ranks.

    ``came`` is what it was before the meeting.
    """
    rows, width = out.shape
    for rank in range(ranks[_RANKS]):
        part = brought(ranks, rank, came, rows, width)
        for row in range(begin, end):
            mine, other = out[row], part[row]
            if rank == 0:
                for d in range(width):
                    mine[d] = other[d]
            else:
                for d in range(width):
                    mine[d] += other[d]


@njit(nogil=True)
def sum_numbers(ranks: np.ndarray, numbers: np.ndarray) -> None:
    """``numbers``, float32 ``[n]``, become the sums of all ranks'."""
    most = ranks[_BYTES] // 4
    for first in range(0, len(numbers), most):
        part = numbers[first : first + most].reshape(1, -1)
        came = ranks[_CAME]
        brought(ranks, ranks[_RANK], came, 1, part.shape[1])[:] = part
        ranks[_CAME] = meet_ranks(0, ranks, came)
        sum_share(0, 1, ranks, came, part)


@njit(nogil=True)
def meet_alone(ranks: np.ndarray) -> None:
    """A meeting of one thread of each rank."""
    ranks[_CAME] = meet_ranks(0, ranks, ranks[_CAME])


@njit
def arrivals(ranks: np.ndarray) -> int:
    """``came`` of ``meet_ranks`` for the first meeting of a call."""
    return int(ranks[_CAME])


@njit
def end_call(me: int, ranks: np.ndarray, came: int) -> None:
    """Keeps ``came`` for the next call; the threads of a team call it after they have met."""
    if me == 0:
        ranks[_CAME] = came


@njit
def widths_of(ranks: np.ndarray) -> Any:
    """The widths of all queries and of all keys, and whether this rank adds its keys."""
    return ranks[_QUERIES], ranks[_KEYS], ranks[_ADDS]


@njit
def rank_of(ranks: np.ndarray) -> int:
    """This rank's number."""
    return int(ranks[_RANK])
