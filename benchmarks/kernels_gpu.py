"""Measures the attention kernels on a GPU, Triton's and FlashInfer's, against what the chip can do.

    python benchmarks/kernels_gpu.py --json benchmarks/results/kernels-gpu.jsonl
    python benchmarks/kernels_gpu.py --quick
    python benchmarks/kernels_gpu.py --dry-run --json benchmarks/results/kernels-gpu-model.jsonl

The first form is for a machine with an H100 or H200, and takes less than 8 minutes: each case has a
time limit, and `--limit` is that of all. `--quick` runs the same cases
at tiny sizes, without a GPU in Triton's interpreter, to check that they run. `--dry-run` prints the
bytes and FLOP of each case, as its plan gives them, without times.

The output is one JSON object a line: the roofs (a copy on the device, a large matrix product), then
a row for each way of each case. Each round runs all ways of a case in turn.

    plain                every sequence reads its own pages (paged decoding)
    tree                 shared stretches are read once
    torch, contiguous    scaled_dot_product_attention over contiguous copies of the same keys, if
                         they fit
    flashinfer           plain, by FlashInfer's kernels, if it imports and they are built; else the
                         first row says why not. Also `flashinfer, tree`, and `flashinfer, cascade`
                         by its cascade wrapper

    of_copy, of_matmul   bandwidth and FLOP/s as fractions of the roofs. They count the bytes that
                         the way's plan reads, and the FLOP of scores that are not masked
    ratio                how many times faster than `plain`, with 10th and 90th percentile of rounds
    goal                 the value to reach
    plan_ms              processor time of making a step's plan

Cases run in a separate process. A case or a way that fails is a row with `error`, and the others
still run.
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
    """A part of the run, the roofs or a case: its name and its time limit in seconds."""

    name: str
    seconds: float


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--dry-run", action="store_true", help="print only bytes and FLOP; needs no GPU"
    )
    options.add_argument(
        "--cases", nargs="+", default=[], metavar="TEXT", help="only cases whose names contain TEXT"
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
            options.error("there is no GPU: give --quick, or --dry-run for the bytes and FLOP")
        os.environ["TRITON_INTERPRET"] = "1"  # read by the process that measures
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
