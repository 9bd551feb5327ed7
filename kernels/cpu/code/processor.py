"""Which instructions the processor has, and the one table of the paths that products take by them.

A kind of products has several ways, best first, and each needs instructions; the first whose
instructions are there is taken. A processor that is not at hand is tested by forcing a way: the
environment variable ``COPPICE_CPU_PATHS`` has a comma-separated list of ``kind=path``, such as
``int8=torch``. It is read when the first product is made. This module is imported where numba is
missing, too: then every kind takes torch's products.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)

_VARIABLE = "COPPICE_CPU_PATHS"

#: What is asked of a processor, by LLVM's names of features.
ASKED = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bf16", "avx512vnni", "avxvnni", "amx-tile",
    "amx-bf16", "amx-int8", "neon", "bf16", "dotprod",
)  # fmt: skip
# Processors that differ from others with the same instructions, by LLVM's names.
_NAMED = ("znver4",)

# What Linux calls an ARM processor's features (Documentation/arch/arm64/elf_hwcaps.rst).
_OF_LINUX = {"neon": "asimd", "bf16": "bf16", "dotprod": "asimddp"}

# Linux's call by which a process asks for the tiles of AMX, on x86-64: what is asked for, and the
# number of that part of a thread's state (Documentation/arch/x86/xstate.rst).
_ARCH_PRCTL, _ASK_FOR_STATE, _TILES = 158, 0x1023, 18

#: The paths of each kind of products, best first, and the features that a path needs.
PATHS: dict[str, dict[str, tuple[str, ...]]] = {
    # Weights of 16 bits and float32, rows and sums in float32.
    "float": {"fma": ("fma", "f16c"), "torch": ()},
    # Weights and rows of bfloat16, sums in float32.
    "bfloat16": {
        "amx": ("avx512f", "avx512bf16", "amx-tile", "amx-bf16"),
        "avx512bf16": ("avx512f", "avx512bf16"),
        "torch": (),
    },
    # Weights and rows of 8 bits, exact sums.
    "int8": {
        "amx": ("avx512vnni", "amx-tile", "amx-int8"),
        "avx512vnni": ("avx512vnni",),
        "avxvnni": ("avxvnni",),
        "avx2": ("avx2",),
        "torch": (),
    },
    # Weights of 4 or 8 bits in groups with factors of float16, rows of 8 bits.
    "int4": {
        "avx512vnni": ("avx512vnni",),
        "avxvnni": ("avxvnni", "f16c"),
        "avx2": ("avx2", "fma", "f16c"),
        "torch": (),
    },
    # Weights of few rows: they come as they are read, or are fetched ahead by instructions.
    "memory": {"read": ("znver4",), "fetched": ()},
}


@cache
def features() -> frozenset[str]:
    """Those of ``ASKED`` that this process may use, and the name of a processor with its own path.

    None where llvmlite is missing.

    A processor's tiles (AMX) may be used once the system has granted them, for which this asks.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return frozenset()
    found = {name for name, has in llvm.get_host_cpu_features().items() if has}
    if sys.platform == "linux" and platform.machine() == "aarch64":
        found |= arm_features(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    names = [name for name in ASKED if name in found]
    names += [name for name in _NAMED if name == llvm.get_host_cpu_name()]
    if "amx-tile" in names and not _granted_tiles():
        _log.info("the processor has AMX, and the system does not grant it")
        names = [name for name in names if not name.startswith("amx")]
    return frozenset(names)


def arm_features(cpuinfo: str) -> set[str]:
    """Features of an ARM processor that LLVM leaves out there, by what Linux says of it."""
    lines = (line for line in cpuinfo.splitlines() if line.startswith("Features"))
    said = next(lines, "").partition(":")[2].split()
    return {name for name, theirs in _OF_LINUX.items() if theirs in said}


def _granted_tiles() -> bool:
    """Whether the system lets the threads of this process use tiles, after it was asked."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILES) == 0)


def path_of(kind: str) -> str:
    """The path that products of a kind of ``PATHS`` take on this processor.

    Raises ``ValueError`` where the environment forces a path that there is not, or that this
    processor has no instructions for.
    """
    paths = PATHS[kind]
    forced = _forced().get(kind)
    if forced is None:
        return next(path for path, needed in paths.items() if features().issuperset(needed))
    missing = [name for name in paths[forced] if name not in features()]
    if missing:
        raise ValueError(
            f"{_VARIABLE} has {kind}={forced}; this processor has no {', '.join(missing)}"
        )
    return forced


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 by instructions of its own, whoever calls them."""
    return not features().isdisjoint(("avx512bf16", "amx-bf16", "bf16"))


def compiled_path(kind: str) -> str:
    """``path_of``, for a module of compiled products; an ``ImportError`` where that is torch's."""
    path = path_of(kind)
    if path != "torch":
        return path
    if _forced().get(kind) == path:
        raise ImportError(f"{_VARIABLE} has {kind}={path}")
    others = [" and ".join(each) for each in PATHS[kind].values() if each]
    raise ImportError(f"{kind} products need {' or '.join(others)}, which this processor lacks")


@cache
def say_paths() -> None:
    """Logs, once, which instructions the processor has and which path each kind takes."""
    taken = ", ".join(f"{kind}: {path_of(kind)}" for kind in PATHS)
    _log.info("processor: %s; products by %s", " ".join(sorted(features())) or "unknown", taken)


def _forced() -> dict[str, str]:
    """The paths that the environment forces, by kind."""
    forced = {}
    for entry in filter(None, os.environ.get(_VARIABLE, "").split(",")):
        kind, _, path = entry.partition("=")
        if path not in PATHS.get(kind, {}):
            allowed = ", ".join(f"{kind}={path}" for kind, paths in PATHS.items() for path in paths)
            raise ValueError(f"{_VARIABLE} has {entry!r}; it must have some of {allowed}")
        forced[kind] = path
    return forced
