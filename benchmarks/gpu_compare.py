"""Compares what only a GPU can decide between, in turn: tiles, graphs, kernels, types of caches.

    python benchmarks/gpu_compare.py --json benchmarks/results/gpu-compare.jsonl
    python benchmarks/gpu_compare.py --quick

The first form is for a machine with an H100 or H200, and takes less than 8 minutes. It has not run
on a GPU yet. `--quick` runs the same comparisons at tiny sizes on the CPU, with Triton's kernels
interpreted. The output is one JSON object a line, by `benchmark`:

    stages of tiles      decoding and prefill with 3 and with 5 tiles of keys in flight
    rows                 the choice of tokens: greedy, by top-p, by top-k and top-p, at vocabularies
                         of 32k and 152k, by itself and in a graph, beside FlashInfer and sorting
    attention in graphs  32 x 8k, 64 x 32k and 256 x 8k tokens, in one layer; `left_out` if the
                         pieces have no room in a graph
    fa2 beside fa3       FlashInfer's kernels for causal prefill, and for a level that 64 and 256
                         sequences share
    fp8 cache            attention over a cache of bfloat16 and over one of e4m3
    decode graphs        the same long contexts in an engine; `fell_back` counts steps that did not
                         run as a graph
    mixed step           sequences that decode beside a prompt, as a graph and kernel by kernel,
                         traced: gaps, and the kernels that take most time
    fp8 cache, decode    an engine that decodes over both types
    cost model           its constants, fitted to the rows of `kernels_gpu.py`

`ratio` is how many times the rate of the first way each way has, in rounds that take turns. A part
that fails or takes too long is a row with `error` or `left_out`, and the others still run.

    --parts TEXT ...   only parts whose names contain one of these texts, and the roofs
    --rows FILE        what `kernels_gpu.py` has written (benchmarks/results/kernels-gpu.jsonl)
    --limit SECONDS    time limit of the whole run (460)
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from common.harness import Rows, machine, parser, require
from fit_cost import RESULTS, fitted_row

NEEDED = ("torch", "triton", "transformers", "safetensors", "huggingface_hub", "numpy", "numba",
          "xxhash", "sortedcontainers", "coppice")  # fmt: skip
LIMIT_SECONDS = 460.0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", default=[], metavar="TEXT")
    options.add_argument("--rows", type=Path, default=RESULTS, metavar="FILE")
    options.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS")
    arguments = options.parse_args()
    require(*NEEDED, gpu=not arguments.quick)
    where = machine()
    if arguments.quick and "gpu" not in where:
        os.environ["TRITON_INTERPRET"] = "1"  # read by the process that measures
    from gpu_suite.compared import all_parts, measure
    from gpu_suite.worker import run_parts

    def wanted(name: str) -> bool:
        return not arguments.parts or any(text in name for text in arguments.parts)

    rows = Rows(arguments.json)

    def add(row: dict[str, Any]) -> None:
        rows.add(**{"benchmark": row.pop("part"), **row})

    with tempfile.TemporaryDirectory() as folder:
        run_parts(
            [part for part in all_parts() if part.name == "roofs" or wanted(part.name)],
            measure,
            add,
            folder=Path(folder),
            quick=arguments.quick,
            limit=arguments.limit,
        )
    if wanted("cost model"):
        rows.add(**fitted_row(arguments.rows), machine=where)


if __name__ == "__main__":
    main()
