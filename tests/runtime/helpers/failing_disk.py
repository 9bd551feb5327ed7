"""A disk that fails or is slow on purpose, for processes of a test."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")


class FailingDisk:
    """What a process with `environment` gets from calls on files whose names have some end."""

    def __init__(self, folder: Path) -> None:
        """Compiles the library; skips the test where there is no compiler for it."""
        compiler = shutil.which("cc")
        if compiler is None or os.uname().sysname != "Linux":
            pytest.skip("there is no C compiler, or no way to load a library before all others")
        self._library, self._rules = folder / "failing_disk.so", folder / "failing_disk.rules"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", self._library, _SOURCE, "-ldl"], check=True
        )
        self.work()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that has this disk."""
        return {"LD_PRELOAD": str(self._library), "FAILING_DISK": str(self._rules)}

    def work(self) -> None:
        """Calls work from now on."""
        self._set("")

    def fail(self, kind: str, end: str, error: int) -> None:
        """Calls of a kind (read, write, sync) on files whose names end so fail from now on."""
        self._set(f"{kind} {end} {error} 0\n")

    def be_slow(self, kind: str, end: str, seconds: float) -> None:
        """Such calls take longer from now on."""
        self._set(f"{kind} {end} 0 {int(seconds * 1e6)}\n")

    def _set(self, rules: str) -> None:
        part = self._rules.with_suffix(".part")
        part.write_text(rules, encoding="ascii")
        part.replace(self._rules)
