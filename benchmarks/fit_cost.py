"""Fits the cost model's constants to the kernel suite's rows of a GPU, and prints the new values.

    python benchmarks/fit_cost.py [benchmarks/results/kernels-gpu.jsonl]

``kernels/schedule/cost.py`` estimates a walk over keys as waves of programs, each of which walks
its keys after a start that takes as long as ``START_KEYS``, and a launch as ``LAUNCH_BYTES``; a
tile says how many of its programs are ``resident`` on a multiprocessor. Here the time of each
decoding case without sharing is such a sum with unknown rate, start and launch: for each number of
resident programs they are fitted by least squares of relative errors, and the number with the
least error is taken. The output is one JSON object: the constants as they are and as fitted, the
rate, and the median relative error, by which to judge whether to take them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coppice.kernels.schedule.cost import H100_MULTIPROCESSORS, LAUNCH_BYTES, START_KEYS
from gpu_suite.attention_cases import WHOLE

RESULTS = Path(__file__).parent / "results" / "kernels-gpu.jsonl"
_MOST_RESIDENT = 8
_FEWEST_ROWS = 6


def fit(rows: Sequence[dict[str, Any]], multiprocessors: int) -> dict[str, Any]:
    """The constants that fit rows of `kernels_gpu.py` best; ValueError if too few are of use."""
    used = [
        row
        for row in rows
        if row.get("benchmark") == "decode" and row.get("way") == "plain" and "times" in row
    ]
    if len(used) < _FEWEST_ROWS:
        raise ValueError(
            f"{len(used)} rows are decoding cases with times; at least {_FEWEST_ROWS} are needed"
        )
    model = WHOLE.model
    seconds = np.array([row["times"]["median_ms"] for row in used]) / 1e3
    programs = np.array([row["programs"] for row in used], float)
    kv = np.array([row["bytes"]["kv"] for row in used], float)
    partials = np.array([row["bytes"]["partials"] for row in used], float)
    launches = 1.0 + (partials > 0)
    best: dict[str, Any] | None = None
    for resident in range(1, _MOST_RESIDENT + 1):
        held = multiprocessors * resident
        waves = programs / held
        waves = np.where(waves > 8, waves + 0.5, np.ceil(waves))
        # Bytes that move while all programs of all waves walk, and while one key of each starts.
        walked = waves * held * kv / programs + partials
        started = waves * held * model.key_bytes
        columns = np.stack([walked, started, launches], axis=1) / seconds[:, None]
        scale = np.linalg.norm(columns, axis=0)
        found = np.linalg.lstsq(columns / scale, np.ones(len(used)), rcond=None)[0] / scale
        if found[0] <= 0 or (found[1:] < 0).any():
            continue
        error = float(np.median(abs(columns @ found - 1)))
        if best is None or error < best["median_relative_error"]:
            best = {
                "resident": resident,
                "START_KEYS": round(found[1] / found[0]),
                "LAUNCH_BYTES": round(found[2] / found[0]),
                "bytes_per_s": 1 / found[0],
                "median_relative_error": round(error, 4),
            }
    if best is None:
        raise ValueError("no number of resident programs fits the rows with positive constants")
    return best


def fitted_row(file: Path, multiprocessors: int = H100_MULTIPROCESSORS) -> dict[str, Any]:
    """The constants as they are and as fitted to the rows of a file; `left_out` says why not."""
    row: dict[str, Any] = {
        "benchmark": "cost model",
        "now": {
            "resident": WHOLE.model.tiles.few.resident,
            "START_KEYS": START_KEYS,
            "LAUNCH_BYTES": LAUNCH_BYTES,
        },
    }
    if not file.exists():
        return {**row, "left_out": f"{file.name} is not there: make gpu-kernels writes it on a GPU"}
    try:
        made = [json.loads(line) for line in file.read_text().splitlines()]
        return {**row, "fitted": fit(made, multiprocessors)}
    except ValueError as error:
        return {**row, "left_out": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("rows", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--multiprocessors", type=int, default=H100_MULTIPROCESSORS)
    arguments = parser.parse_args()
    row = fitted_row(arguments.rows, arguments.multiprocessors)
    if "left_out" in row:
        sys.exit(row["left_out"])
    print(json.dumps(row))


if __name__ == "__main__":
    main()
