"""Counts what Triton compiles: each variant of a kernel that a launch asks for the first time.

It asks Triton itself, whether it compiles the variant or finds it in its cache of files. So it
needs compiled kernels; ``CountingCompiler`` in test_warm_up.py stands for it where kernels are
interpreted.
"""

from __future__ import annotations

from typing import Any

from triton import knobs


class Compilations:
    """The names of kernels that were compiled while this is entered, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Compilations:
        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._compiled
        return self

    def __exit__(self, *error: object) -> None:
        knobs.runtime.jit_post_compile_hook = self._before

    def _compiled(self, **told: Any) -> None:
        self.names.append(told["repr"])
