"""Numbers in memory that several threads, or processes, change and wait for at the same time."""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.kept import njit

_LONG = ir.IntType(64)
# Instructions by which a thread that waits leaves the core to another of the same core.
_PAUSES = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "amd64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
    "arm64": ("llvm.aarch64.hint", (1,)),
}
_PAUSE = _PAUSES.get(platform.machine().lower())
#: Polls of a number, with a pause each, before a thread sleeps: some 150 us. A thread in a virtual
#: machine may take 100 us to wake up. With a third of the polls the others fell asleep meanwhile,
#: and then the first one again, and decoding steps took 1.05 to 1.1 times as long.
LOOKS = 3000
# Microseconds of a nap (the system adds as much).
_NAP = 50
# The number of the system's call for waiting on a number (futex(2)); None where there is none.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
#: Whether threads can sleep until a number changes.
SLEEPS = _FUTEX is not None
#: What `sleep_while` and `wake` are told: whether other processes share the number.
OWN, SHARED = 128, 0
_ALL = 2**31 - 1


def _at(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _LONG.as_pointer())


@intrinsic
def count(typing: Any, address: Any, more: Any) -> Any:
    """Adds to the number at ``address`` and returns what it was.

    A thread that reads the sum also sees everything that this one has written before.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.atomic_rmw("add", _at(b, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def read(typing: Any, address: Any) -> Any:
    """The number at ``address``, as it is now."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.load_atomic(_at(b, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def replace(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Whether the number at ``address`` was ``old``, and is ``new`` now."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        address, old, new = arguments
        both = b.cmpxchg(_at(b, address), old, new, "seq_cst", "seq_cst")
        return b.extract_value(both, 1)

    return types.boolean(*[types.int64] * 3), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Leaves the core to another thread of it for some cycles."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if _PAUSE is not None:
            name, numbers = _PAUSE
            values = [ir.Constant(ir.IntType(32), number) for number in numbers]
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            b.call(cgutils.get_or_insert_function(b.module, kind, name), values)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def nap(typing: Any) -> Any:
    """Sleeps for 50 microseconds, and as long as the system adds to them."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        time = ir.Constant(ir.IntType(32), _NAP)
        kind = ir.FunctionType(ir.IntType(32), [time.type])
        b.call(cgutils.get_or_insert_function(b.module, kind, "usleep"), [time])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _futex(typing: Any, address: Any, what: Any, number: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        zero = ir.Constant(_LONG, 0)
        values = [ir.Constant(_LONG, _FUTEX or 0), *arguments, zero, zero, zero]
        kind = ir.FunctionType(_LONG, [_LONG] * len(values))
        b.call(cgutils.get_or_insert_function(b.module, kind, "syscall"), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@njit
def sleep_while(address: int, number: int, who: int) -> None:
    """Sleeps while the low half of the number at ``address`` is that of ``number``.

    May return earlier. ``who`` is ``OWN`` or ``SHARED``. Only where ``SLEEPS``.
    """
    _futex(address, who, number)


@njit
def wake(address: int, who: int) -> None:
    """Wakes all that sleep by ``sleep_while`` at that address."""
    _futex(address, who + 1, _ALL)
