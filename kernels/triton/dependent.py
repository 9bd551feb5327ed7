"""Programmatic dependent launch: a kernel's programs start while the kernel before it ends.

They wait for its results before they read or write anything, so that only the launch and the start
of programs overlap. Every kernel that is launched so must call ``begin`` first, in every program:
else one that ends early would let the kernel after it begin before the one before it has ended.

Two kernels are launched without, ``deliver_words`` and ``copy_page_words``: a transfer comes right
before them, and a graph or an operation of torch right after, so there is nothing to overlap.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# The first compute capability that has it.
_CAPABILITY = (9, 0)


@triton.jit
def begin(DEPENDENT: tl.constexpr) -> None:
    """Wait for the kernel before this one, and let the next one's programs start."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def dependent(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch on that device: its constant, and Triton's option where it is on.

    It is on where the chip has it, and Triton the option and both instructions.
    """
    on = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY
    return {"DEPENDENT": True, "launch_pdl": True} if on and offered() else {"DEPENDENT": False}


def offered() -> bool:
    """Whether the installed Triton offers it."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    cuda = getattr(tl.extra, "cuda", None)
    instructions = all(hasattr(cuda, name) for name in ("gdc_wait", "gdc_launch_dependents"))
    return instructions and "launch_pdl" in CUDAOptions.__dataclass_fields__
