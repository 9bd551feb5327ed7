"""Calling a compiled function by its address, alone or shared among numba's threads.

A large function that several others call is compiled once this way, and not again with each
caller. It takes the address of a frame, an int64 array of its arguments, addresses among them, and
the range of tasks to do. A named tuple is ``lent`` to it by its address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.threads import use_torch_threads

# Code that calls parallel code needs numba's threads, and crashes without them. Code from numba's
# cache may lack the request to start them, if its callee came from the cache when it was compiled.
use_torch_threads()

_NUMBERS = {
    "i": types.int64, "n": types.int32, "c": types.int8, "f": types.float32, "b": types.boolean,
}  # fmt: skip


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def run_share(typing: Any, function: Any, frame: Any, begin: Any, end: Any) -> Any:
    """Calls the function at that address with a frame and the tasks ``begin .. end``."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        b.call(b.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def tuple_type(kind: Any, *fields: Any) -> Any:
    """The type of a named tuple in compiled code.

    A field is a type, or several are a text with a word for each: a letter for its numbers, ``i``
    int64, ``n`` int32, ``c`` int8, ``f`` float32, ``b`` bool, and the dimensions of an array.
    """
    found = []
    for field in fields:
        for word in field.split() if isinstance(field, str) else [field]:
            if isinstance(word, str):
                number = _NUMBERS[word[0]]
                word = types.Array(number, int(word[1:]), "C") if word[1:] else number
            found.append(word)
    return types.BaseTuple.from_types(tuple(found), kind)


@intrinsic
def lent(typing: Any, kind: Any, value: Any) -> Any:
    """The address of ``value``, of that type; it is valid until the calling function returns.

    That function then calls ``held`` with the value: numba frees the arrays in it after the last
    use of the value, not of the address.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.ptrtoint(cgutils.alloca_once_value(b, arguments[1]), ir.IntType(64))

    return types.int64(kind, kind.instance_type), generate


def _without_owners(context: Any, b: Any, kind: Any, value: Any) -> Any:
    """A value whose arrays are as in ``value``, and nobody counts who uses them."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, b, value)
        for owner in ("meminfo", "parent"):
            setattr(array, owner, cgutils.get_null_value(getattr(array, owner).type))
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for i, field in enumerate(kind):
            mine = _without_owners(context, b, field, b.extract_value(value, i))
            value = b.insert_value(value, mine, i)
    return value


@intrinsic
def borrowed(typing: Any, kind: Any, address: Any) -> Any:
    """The value of that type that is ``lent`` at an address.

    Its arrays are kept by the lender alone: numba counts their users with locked additions, for
    which the threads of a team would wait for each other, 4 % of a step of one sequence.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        pointed = context.get_value_type(kind.instance_type).as_pointer()
        value = b.load(b.inttoptr(arguments[1], pointed))
        return _without_owners(context, b, kind.instance_type, value)

    return kind.instance_type(kind, types.int64), generate


@intrinsic
def held(typing: Any, value: Any) -> Any:
    """Does nothing with a value, so that it is not freed before."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(value), generate


@njit(parallel=True)
def run_shares(function: int, frame: int, shares: np.ndarray) -> None:
    """Thread i does the tasks ``shares[i] .. shares[i + 1]``."""
    for share in prange(len(shares) - 1):
        run_share(function, frame, shares[share], shares[share + 1])
