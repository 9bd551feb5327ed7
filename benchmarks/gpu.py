"""Measures the whole engine on one GPU, against what the chip itself can do.

    python benchmarks/gpu.py --json benchmarks/results/gpu.jsonl
    python benchmarks/gpu.py --quick

The first form is for a machine with an H100 or H200, and takes less than 8 minutes. `--quick` runs
the same parts at tiny sizes on the CPU, to check that they run.

Models have the shapes of Llama-3.1-8B and Qwen3-0.6B, with random weights made on the GPU. The
output is one JSON object a line, by `benchmark`:

    roofs                a copy on the device, a large matrix product
    start                making the engine, and the first requests, which compile kernels
    decode               batches of 1, 32 and 256, beside the time of reading weights and KV at the
                         rate of the copy; also with fp8
    gaps                 the time between kernels in a decoding step
    prefill              beside the rate of the product
    system prompt        requests that share one, with attention shaped like the tree, without, and
                         without a cache
    samples, beams       with attention shaped like the tree, and without
    beside transformers  its continuous batching on the same weights
    rows                 kernels between the products: ours, FlashInfer's and torch's
    triton instead       some parts again by Triton, if FlashInfer is installed and so was used
    ratio                between the rows above, with the goals

Each part has a time limit. A row that did not finish has `cut`, a part that fails is a row with
`error`, and the other parts still run.

    --parts TEXT ...   only parts whose names contain one of these texts, and the roofs
    --limit SECONDS    time limit of the whole run (460)

Missing packages are named. An interpreter that lacks only coppice finds it by a folder with a link
to `coppice` in PYTHONPATH, as in the Makefile. This repository's own folder does not serve: its
`kernels` hides Hugging Face's package of that name.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common.harness import Rows, parser, require

NEEDED = ("torch", "transformers", "safetensors", "huggingface_hub", "numpy", "numba", "xxhash",
          "sortedcontainers", "coppice")  # fmt: skip
LIMIT_SECONDS = 460.0

Row = dict[str, Any]


def ratios(rows: list[Row]) -> list[Row]:
    """How many times faster one row is than another, for pairs that both finished, and the goals.

    Needs rows with their absolute times.
    """

    made: list[Row] = []

    def add(of: str, fast: Row, slow: Row, **goal: float) -> None:
        """Adds the ratio of the first finished rows that have all items of `fast` and of `slow`."""
        rates = []
        for wanted in (fast, slow):
            for row in rows:
                whole = not row.get("cut") and "attention_backend" not in row
                if whole and all(row.get(key) == value for key, value in wanted.items()):
                    rates.append(row["times"]["tokens_per_s"])
                    break
        if len(rates) == 2:
            ratio = round(rates[0] / rates[1], 2)
            made.append(
                {"benchmark": "ratio", "of": of, "model": fast["model"], "ratio": ratio, **goal}
            )

    for model in dict.fromkeys(row["model"] for row in rows if "model" in row):
        stem = {"benchmark": "system prompt", "model": model, "enable_prefix_caching": True}
        tree, plain = stem | {"sharing": True}, stem | {"sharing": False}
        uncached = plain | {"enable_prefix_caching": False}
        add("system prompt, tree over no cache", tree, uncached, goal=6.4)
        add("system prompt, tree over plain", tree, plain)
        for name in ("samples", "beams"):
            add(f"{name}, tree over plain", *(
                {"benchmark": name, "model": model, "sharing": on} for on in (True, False)
            ))  # fmt: skip
        both = {"benchmark": "beside transformers", "model": model}
        add("over transformers' continuous batching",
            both | {"side": "coppice"}, both | {"side": "transformers"}, goal=5.0)  # fmt: skip
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", default=[], metavar="TEXT")
    options.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS")
    arguments = options.parse_args()
    require(*NEEDED, *(() if arguments.quick else ("triton",)), gpu=not arguments.quick)
    from gpu_suite.parts import all_parts, measure
    from gpu_suite.worker import run_parts

    chosen = [
        part
        for part in all_parts()
        if not arguments.parts
        or part.name == "roofs"
        or any(text in part.name for text in arguments.parts)
    ]
    writer = Rows(arguments.json)
    rows: list[Row] = []

    def add(row: Row) -> None:
        part = row.pop("part")
        name, _, model = part.partition(", ")
        row = {"benchmark": name, **({"model": model} if model else {}), **row}
        rows.append(row)
        writer.add(**row)

    with tempfile.TemporaryDirectory() as folder:
        run_parts(
            chosen,
            measure,
            add,
            folder=Path(folder),
            quick=arguments.quick,
            limit=arguments.limit,
        )
    for row in ratios(rows):
        writer.add(**row)


if __name__ == "__main__":
    main()
