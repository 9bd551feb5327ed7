"""Calling a compiled function by its address, alone or shared among numba's threads.

A large function that several others call is compiled once this way, and not again with each
caller. It takes the address of a frame, an int64 array of its arguments, addresses among them, and
the range of tasks to do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from coppice.kernels.cpu.code.kept import njit
from coppice.kernels.cpu.code.threads import use_torch_threads

# Code that calls parallel code needs numba's threads, and crashes without them. Code from numba's
# cache may lack the request to start them, if its callee came from the cache when it was compiled.
use_torch_threads()


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


@njit(parallel=True)
def run_shares(function: int, frame: int, shares: np.ndarray) -> None:
    """Thread i does the tasks ``shares[i] .. shares[i + 1]``."""
    for share in prange(len(shares) - 1):
        run_share(function, frame, shares[share], shares[share + 1])
