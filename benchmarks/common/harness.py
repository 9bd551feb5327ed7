"""What every benchmark shares: two options, rows of JSON, and a description of the machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Those that products are made of, from the widest on; what an x86 processor's rows depend on.
_INSTRUCTIONS = ("amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2")


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with `--json FILE` and `--quick`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    made.add_argument("--quick", action="store_true", help="small sizes: checks that it runs")
    return made


class Rows:
    """Prints each row as one line of JSON, and also writes it to `file` unless that is None.

    Absolute times stand under the key `times`. The file keeps them only if they come from a GPU:
    times on a CPU hold for one machine on one day, their ratios for longer.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    def add(self, **row: Any) -> None:
        print(json.dumps(row), flush=True)
        if "gpu" not in row.get("machine", ()):
            row.pop("times", None)
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(json.dumps(row) + "\n")


def processor() -> dict[str, Any]:
    """The processor, its widest instructions, the cores of this process, and Python's version."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
        elif line.startswith("flags"):
            flags.update(line.split())
            break
    widest = next(filter(flags.__contains__, _INSTRUCTIONS), None)
    return {
        "cpu": name,
        **({} if widest is None else {"instructions": widest}),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """The processor, torch's version, and the GPU if there is one."""
    import torch

    found = {**processor(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def require(*packages: str, gpu: bool) -> None:
    """Ends the program with a message if one of `packages`, or the GPU, is missing."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        sys.exit(f"{sys.executable} lacks {', '.join(absent)}")
    if gpu:
        import torch

        if not torch.cuda.is_available():
            sys.exit(f"{sys.executable} finds no NVIDIA GPU, or its torch is built without CUDA")


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }


def compare(
    name: str, shape: dict[str, Any], ways: dict[str, Callable[[], Any]], rounds: int
) -> list[dict[str, Any]]:
    """Rows of ways that are timed in turn, round after round; the first is the baseline."""
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - started)
    return ratio_rows(name, shape, times)


def ratio_rows(
    name: str, shape: dict[str, Any], times: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Rows that say how many times faster each way is than the first one, from seconds by round."""
    baseline = next(iter(times))
    rows = []
    for way, measured in times.items():
        ratios = sorted(b / t for b, t in zip(times[baseline], measured, strict=True))
        rows.append(
            {
                "benchmark": name,
                **shape,
                "way": way,
                "baseline": baseline,
                "ratio": round(ratios[len(ratios) // 2], 3),
                "ratio_low": round(ratios[len(ratios) // 10], 3),
                "ratio_high": round(ratios[-1 - len(ratios) // 10], 3),
                "times": {"best_ms": round(min(measured) * 1e3, 3)},
            }
        )
    return rows
