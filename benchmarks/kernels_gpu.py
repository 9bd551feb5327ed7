"""Measure the attention kernels on a GPU, Triton's and FlashInfer's, against what the chip can do.

    python benchmarks/kernels_gpu.py --json benchmarks/results/kernels-gpu.jsonl
    python benchmarks/kernels_gpu.py --quick
    python benchmarks/kernels_gpu.py --dry-run --json benchmarks/results/kernels-gpu-model.jsonl

The first is the one command for a machine with an H100 or H200. It is through in under 8 minutes:
each case stops after so many seconds, and all of them after ``--limit``; it has not run on a GPU
yet. ``--quick`` runs the same cases at tiny sizes, without a GPU in Triton's interpreter, to see
that they run. ``--dry-run`` prints each case with the bytes and FLOP that the plan of the step
moves and computes, and no times.

One JSON object a line: first the roofs, a device-to-device copy and a large matrix product, then
the cases, each measured in rounds that run all its ways in turn. ``of_copy`` and ``of_matmul`` are
the bandwidth and the FLOP/s that a way reached, as fractions of the roofs, counted with the bytes
that it has to move (each page that it reads once, as often as its own plan reads it) and the FLOP
of unmasked scores. ``ratio`` is how many times faster than the first way it is, with the 10th and
90th percentile over rounds; ``goal`` what is meant to be reached. ``plan_ms`` is the processor's
time for the plan of a step. Ways: every sequence by itself (plain paged decode), the tree, torch's
scaled_dot_product_attention over contiguous copies of the same keys where they fit, and, where
FlashInfer imports and its kernels are there, the first two by its kernels, and the tree by its own
cascade wrapper. Where they are not, the first line says why. Cases run in a process that is
watched: a case or a way that fails is a row with ``error``, and the rest goes on.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.harness import Rows, machine, parser
from gpu_suite.attention_cases import WHOLE, cases, described

LIMIT_SECONDS = 450.0


@dataclass(frozen=True, slots=True)
class Part:
    """The roofs, or a case: its name, and the seconds that it may take."""

    name: str
    seconds: float


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dry-run", action="store_true", help="bytes and FLOP only, no GPU")
    options.add_argument(
        "--cases", nargs="+", default=[], metavar="TEXT", help="only those with it"
    )
    options.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS")
    arguments = options.parse_args()
    rows = Rows(arguments.json)
    where = machine()
    chosen = [
        case
        for case in cases()
        if not arguments.cases or any(text in case.part for text in arguments.cases)
    ]
    if arguments.dry_run:
        for case in chosen:
            rows.add(**described(case, WHOLE), machine=where)
        return
    if "gpu" not in where:
        if not arguments.quick:
            options.error("no GPU is here: give --quick, or --dry-run for the bytes and FLOP")
        os.environ["TRITON_INTERPRET"] = "1"  # for the process that measures
    from gpu_suite.attention import serve
    from gpu_suite.worker import run_parts

    def add(row: dict[str, Any]) -> None:
        name = row.pop("part").partition(",")[0]
        rows.add(**{"benchmark": name, **row, "machine": where})

    with tempfile.TemporaryDirectory() as folder:
        run_parts(
            [Part("roofs", 60.0), *(Part(case.part, case.seconds) for case in chosen)],
            serve,
            add,
            folder=Path(folder),
            quick=arguments.quick,
            limit=arguments.limit,
        )


if __name__ == "__main__":
    main()
