"""Runs a benchmark over several checkouts of this repository in turn, each in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent.parent

#: What tells a process that it measures for another one.
INSIDE = "COPPICE_BENCHMARK_TREE"


def commit(folder: Path) -> str:
    """The commit of a checkout, with + if it has changes; the folder's name if git knows none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return folder.name


def in_turn(
    script: str, folders: Sequence[Path], arguments: Sequence[str], rounds: int
) -> Iterator[dict[str, Any]]:
    """The rows of ``script`` with the package of each folder, round after round.

    The script is this checkout's; only ``coppice`` is the other's. Each row has its ``commit``.
    """
    for _ in range(rounds):
        for folder in folders:
            if not (folder / "coppice" / "__init__.py").exists():
                sys.exit(f"{folder} is no checkout: it has no coppice/__init__.py")
            with tempfile.TemporaryDirectory() as path:
                # The folder itself does not serve: its `kernels` hides another package.
                (Path(path) / "coppice").symlink_to((folder / "coppice").resolve())
                told = {"PYTHONPATH": path, INSIDE: "1"}
                ran = subprocess.run(
                    [sys.executable, script, *arguments],
                    env={**os.environ, **told}, stdout=subprocess.PIPE, text=True, check=True,
                )  # fmt: skip
            for line in ran.stdout.splitlines():
                yield {"commit": commit(folder), **json.loads(line)}
