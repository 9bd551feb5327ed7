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

import platform
import sys
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.threads import use_torch_threads

use_torch_threads()  # before compiled code is loaded; see ``code.calls``

_LONG = ir.IntType(64)
# Instructions by which a thread that waits leaves the core to another of the same core.
_PAUSES = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "amd64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
    "arm64": ("llvm.aarch64.hint", (1,)),
}
_PAUSE = _PAUSES.get(platform.machine().lower())
# Polls of the count, with a pause each, before a thread sleeps: some 50 us.
_LOOKS = 1000
# Microseconds of a sleep (the system adds as much), and sleeps before a team that has not gathered
# ends: a tenth of a second in all.
_NAP, _PATIENCE = 50, 1000
# Places in the state, int64, each in its own cache line. At place 0 is the count of meetings'
# arrivals; then come the number of sleeping threads and the number of threads that are present.
_SLEEPING, _PRESENT, _SIZE = 16, 32, 48
_ENDED = -(1 << 40)
# The number of the system's call for waiting on a number (futex(2)); None where there is none.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 128, 129  # of this process alone
_ALL = 2**31 - 1


def _at(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _LONG.as_pointer())


@intrinsic
def _count(typing: Any, address: Any, more: Any) -> Any:
    """Adds to the number at ``address`` and returns what it was.

    A thread that reads the sum also sees everything that this one has written before.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.atomic_rmw("add", _at(b, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _read(typing: Any, address: Any) -> Any:
    """The number at ``address``, as it is now."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.load_atomic(_at(b, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _replace(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Whether the number at ``address`` was ``old``, and is ``new`` now."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        address, old, new = arguments
        both = b.cmpxchg(_at(b, address), old, new, "seq_cst", "seq_cst")
        return b.extract_value(both, 1)

    return types.boolean(*[types.int64] * 3), generate


@intrinsic
def _pause(typing: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if _PAUSE is not None:
            name, numbers = _PAUSE
            values = [ir.Constant(ir.IntType(32), number) for number in numbers]
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            b.call(cgutils.get_or_insert_function(b.module, kind, name), values)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _nap(typing: Any) -> Any:
    """Sleeps for ``_NAP`` microseconds."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        time = ir.Constant(ir.IntType(32), _NAP)
        kind = ir.FunctionType(ir.IntType(32), [time.type])
        b.call(cgutils.get_or_insert_function(b.module, kind, "usleep"), [time])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _futex(typing: Any, address: Any, what: Any, number: Any) -> Any:
    """Sleeps while the low half of what lies at ``address`` is ``number``, or wakes ``number``."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        zero = ir.Constant(_LONG, 0)
        values = [ir.Constant(_LONG, _FUTEX or 0), *arguments, zero, zero, zero]
        kind = ir.FunctionType(_LONG, [_LONG] * len(values))
        b.call(cgutils.get_or_insert_function(b.module, kind, "syscall"), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


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
    _count(present, 1)
    looks = 0
    while True:
        here = _read(present)
        if here < 0:
            return False
        if here >= threads:
            return True
        looks += 1
        if looks < _LOOKS:
            _pause()
        elif looks < _LOOKS + _PATIENCE:
            _nap()
        elif _replace(present, here, _ENDED):
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
    if _count(address, 1) == goal - 1:
        # A thread that has counted itself as sleeping before this read is woken; one that does so
        # later sees that all have come.
        if _FUTEX is not None and _read(address + 8 * _SLEEPING):
            _futex(address, _WAKE, _ALL)
        return goal
    for _ in range(_LOOKS):
        if _read(address) >= goal:
            return goal
        _pause()
    if _FUTEX is None:
        while _read(address) < goal:
            _nap()
        return goal
    _count(address + 8 * _SLEEPING, 1)
    while True:
        come = _read(address)
        if come >= goal:
            break
        _futex(address, _WAIT, come)
    _count(address + 8 * _SLEEPING, -1)
    return goal
