"""Our own Llama beside transformers' Llama on our pages (`model_impl`), in the same engine.

    python benchmarks/cpu/implementations.py [--cache DIR] [--json FILE] [--quick]

One checkpoint with random weights: model S of `cpu/checkpoints.py`, 30 layers of 576, 16 bits. One
thread. A row for each kind of step, over rounds in which the sides take turns, each first in every
second one: `tokens_a_second` is that of transformers' model as a share of ours. Of decodes a round
takes the median of 16 steps, at 144 tokens and more of context.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

# Python puts a script's own folder on the import path; this one needs the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from common.harness import Rows, machine, parser, spread
from coppice import Engine, EngineConfig
from cpu.checkpoints import checkpoint
from cpu.steps import decode_steps, prefill_step

SIDES = ("coppice", "transformers")


def seconds(engine: Engine, step: str, size: int, seed: int) -> float:
    """The time of one kind of step."""
    if step == "prefill":
        return prefill_step(engine, size, seed)[0]
    return statistics.median(decode_steps(engine, size, 128, 16, 16))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "coppice")
    args = options.parse_args()
    torch.set_num_threads(1)
    path = str(checkpoint("S", args.cache, "bfloat16"))
    engines = {
        side: Engine(
            EngineConfig(
                model=path, model_impl=side, kv_cache_tokens=8192, max_num_batched_tokens=1024
            )
        )
        for side in SIDES
    }
    rows = Rows(args.json)
    for step, size in (("prefill", 256), ("prefill", 1024), ("decode", 1), ("decode", 8)):
        ratios = []
        for seed in range(4 if args.quick else 9):
            order = SIDES[::-1] if seed % 2 else SIDES
            took = {side: seconds(engines[side], step, size, seed) for side in order}
            if seed:  # the first takes memory
                ratios.append(took["coppice"] / took["transformers"])
        rows.add(
            benchmark="model_impl",
            model="S",
            step=step,
            size=size,
            tokens_a_second=spread(ratios),
            machine=machine(),
        )


if __name__ == "__main__":
    main()
