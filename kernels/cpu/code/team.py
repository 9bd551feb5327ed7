"""Threads that work one compiled function together, and wait for each other within it.

A parallel loop of numba's calls OpenMP, which wakes the threads, divides the loop and waits for
all: some 20 microseconds, seven times in a layer of a decode step. Here the threads are woken once,
and each runs the same function with its own number. Where a thread needs what the others have
written, all meet at a barrier: each adds itself to a count and polls the count, which takes a
fraction of a microsecond. (Sense-reversing barriers, Mellor-Crummey and Scott 1991, section 3.1;
the count only grows, so there is no sense to reverse.) A thread that has polled for long sleeps
until the last one comes and wakes all: where other programs want the processors, too, polling would
keep them from the thread that the others wait for.

The iterations of a parallel loop need not run at the same time. So the threads gather first, and a
thread that waits too long for the others ends the team: all return then, and the caller lets one
thread do all the work.

    state = new_team()
    for me in prange(threads):
        if gathered(state.ctypes.data, threads):
            work(member(me, threads, state.ctypes.data), ...)
    if not came_together(state):
        work(member(0, 1, state.ctypes.data), ...)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coppice.kernels.cpu.code.atomics import (
    LOOKS,
    OWN,
    SLEEPS,
    count,
    nap,
    pause,
    read,
    replace,
    sleep_while,
    wake,
)
from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.threads import use_torch_threads

use_torch_threads()  # before compiled code is loaded; see ``code.calls``

# Naps before a team that has not gathered ends: a tenth of a second in all.
_PATIENCE = 1000
# Places in the state, int64, each in its own cache line. At place 0 is the count of meetings'
# arrivals; then come the number of sleeping threads and the number of threads that are present.
_SLEEPING, _PRESENT, _SIZE = 16, 32, 48
_ENDED = -(1 << 40)


class Member(NamedTuple):
    """Thread ``me`` of a team of ``threads``, whose state is at an ``address``."""

    me: int
    threads: int
    address: int


@njit
def member(me: int, threads: int, address: int) -> Member:
    """A member with numbers of one type: a parallel loop's are unsigned, others are not."""
    return Member(np.int64(me), np.int64(threads), np.int64(address))  # type: ignore[arg-type]


@njit
def new_team() -> np.ndarray:
    """The state of a team that has not gathered yet; the members take its address."""
    return np.zeros(_SIZE, np.int64)


@njit
def gathered(address: int, threads: int) -> bool:
    """Whether all threads are here; False if one has waited too long. Each calls it first."""
    if threads <= 1:
        return True
    present = address + 8 * _PRESENT
    count(present, 1)
    looks = 0
    while True:
        here = read(present)
        if here < 0:
            return False
        if here >= threads:
            return True
        looks += 1
        if looks < LOOKS:
            pause()
        elif looks < LOOKS + _PATIENCE:
            nap()
        elif replace(present, here, _ENDED):
            return False


@njit
def came_together(state: np.ndarray) -> bool:
    """Whether the threads had gathered; valid when all have returned."""
    return bool(state[_PRESENT] >= 0)


@njit
def meet(team: Member, met: int) -> int:
    """Waits until all members have come here, and sees what they have written; the new ``met``.

    ``met`` is 0 at first, then the result of the meeting before.
    """
    if team.threads <= 1:
        return met
    address, goal = team.address, met + team.threads
    if count(address, 1) == goal - 1:
        # A thread that has counted itself as sleeping before this read is woken; one that does so
        # later sees that all have come.
        if SLEEPS and read(address + 8 * _SLEEPING):
            wake(address, OWN)
        return goal
    for _ in range(LOOKS):
        if read(address) >= goal:
            return goal
        pause()
    if not SLEEPS:
        while read(address) < goal:
            nap()
        return goal
    count(address + 8 * _SLEEPING, 1)
    while True:
        come = read(address)
        if come >= goal:
            break
        sleep_while(address, come, OWN)
    count(address + 8 * _SLEEPING, -1)
    return goal
