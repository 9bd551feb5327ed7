"""Measure the whole engine on one GPU, against what the chip itself can do.

    python benchmarks/gpu.py --json benchmarks/results/gpu.jsonl
    python benchmarks/gpu.py --quick

The first is the one command for a machine with an H100 or H200: it is through in under 8 minutes.
`--quick` runs the same parts at tiny sizes on the CPU, to see that they run.

Models have the shapes of Llama-3.1-8B and Qwen3-0.6B, and random weights that are made on the GPU.
One JSON object a line: the roofs (a device-to-device copy, a large product), then for each model
decoding at batches of 1, 32 and 256, beside the floor that reading weights and KV takes at the rate
of the copy; the gaps between kernels in it; prefill, beside the rate of the product; requests
behind one system prompt, with attention shaped like the tree, without, and without a cache; samples
and beams; transformers' continuous batching on the same weights; decoding in fp8; and what Triton
does where FlashInfer, which is taken if it is installed, did the rest. The last rows are ratios
between rows, beside the goals. Every part has its time: what it does not finish is `cut`, what
fails is a row with `error`, and the rest goes on.

    --parts TEXT ...   only parts whose names have one of these in them (roofs are always measured)
    --limit SECONDS    the time for all (460)

A package that is missing is named. The interpreter at hand may lack coppice alone: give it a folder
with a link to `coppice` in PYTHONPATH, as the Makefile does, and not this repository's own, whose
`kernels` would hide Hugging Face's package of that name.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common.harness import Rows, parser, require

NEEDED = ("torch", "transformers", "safetensors", "huggingface_hub", "numpy", "numba", "xxhash",
          "sortedcontainers", "llguidance", "coppice")  # fmt: skip
LIMIT_SECONDS = 460.0

Row = dict[str, Any]


def ratios(rows: list[Row]) -> list[Row]:
    """How many times faster one row is than another, where both came to their end, and the goals.

    Absolute times are in the rows, so this needs those as they were measured.
    """

    made: list[Row] = []

    def add(of: str, fast: Row, slow: Row, **goal: float) -> None:
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
