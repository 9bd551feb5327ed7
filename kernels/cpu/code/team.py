"""Threads that work one compiled function together, and wait for each other within it.

A parallel loop of numba's is a call into OpenMP, which wakes the threads, deals the loop out and
waits for all: some 20 microseconds here, of which a layer of a decode step would take seven. Here
the threads are woken once, each runs the same function with its own number, and where one needs
what the others have made they meet: each counts itself in and watches the count, a fraction of a
microsecond. (Sense-reversing barriers, Mellor-Crummey and Scott 1991, section 3.1; the count only
grows, so there is no sense to reverse.) Who has watched for long sleeps until the last one comes
and wakes all: where other programs want the processors, too, watching on would keep them from the
one that is waited for.

Nobody promises that a parallel loop's iterations run at the same time. So the threads gather first,
and who waits too long for the others ends the team: all return then, and the caller lets one thread
do all the work.

    team = new_team()
    for me in prange(threads):
        work(me, threads, team.ctypes.data, ...)         # begins with `gathered`
    if not came_together(team):
        work(0, 1, team.ctypes.data, ...)
"""

from __future__ import annotations

import platform
import sys
from typing import Any

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
# Looks at the count, a pause each, before a thread sleeps: some 50 us.
_LOOKS = 1000
# Sleeps of so many microseconds before a team that has not gathered ends: a tenth of a second.
_NAP, _PATIENCE = 50, 1000
# Of the state, int64, each in a line of the cache: the count of those who meet, how many of them
# sleep, and who is present.
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
    """Adds to the number at ``address``; what was written before is seen by who reads it.

    It returns what the number was.
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
    """Sleeps while the low half of what lies at ``address`` is ``number``; or wakes so many."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        zero = ir.Constant(_LONG, 0)
        values = [ir.Constant(_LONG, _FUTEX or 0), *arguments, zero, zero, zero]
        kind = ir.FunctionType(_LONG, [_LONG] * len(values))
        b.call(cgutils.get_or_insert_function(b.module, kind, "syscall"), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@njit
def new_team() -> np.ndarray:
    """The state of a team that has not gathered yet; its address is what the others are given."""
    return np.zeros(_SIZE, np.int64)


@njit
def gathered(team: int, threads: int) -> bool:
    """Whether all threads are here; False if one had waited too long. To be called first."""
    if threads <= 1:
        return True
    present = team + 8 * _PRESENT
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
def came_together(team: np.ndarray) -> bool:
    """Whether the threads had gathered; to be asked when all have returned."""
    return bool(team[_PRESENT] >= 0)


@njit
def meet(team: int, threads: int, met: int) -> int:
    """Waits until all have come here, and sees what they have written; the new ``met``.

    ``met`` is 0 at first, then what the meeting before returned.
    """
    if threads <= 1:
        return met
    goal = met + threads
    if _count(team, 1) == goal - 1:
        # Who counts as sleeping before this look is woken; who does later sees that all have come.
        if _FUTEX is not None and _read(team + 8 * _SLEEPING):
            _futex(team, _WAKE, _ALL)
        return goal
    for _ in range(_LOOKS):
        if _read(team) >= goal:
            return goal
        _pause()
    if _FUTEX is None:
        while _read(team) < goal:
            _nap()
        return goal
    _count(team + 8 * _SLEEPING, 1)
    while True:
        come = _read(team)
        if come >= goal:
            break
        _futex(team, _WAIT, come)
    _count(team + 8 * _SLEEPING, -1)
    return goal
