"""A model divided among two ranks beside the same model in one process with both cores.

    python benchmarks/cpu/ranks.py [--cache DIR] [--json FILE] [--quick] [--stored bfloat16]

Model S of `cpu/checkpoints.py` with random weights. Each side is a process of its own; one has two
threads, the other is two ranks of one core each. A row for each kind of step, over rounds in which
the sides take turns: `speed` is that of the ranks as a share of the other's. Of decodes a round
takes the median of 16 steps. The last row has what a step's plan and its sums cost.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Python puts a script's own folder on the import path; this one needs the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.harness import Rows, machine, parser, spread
from cpu.checkpoints import checkpoint

SIDES = (1, 2)
STEPS = (("decode", 1), ("decode", 4), ("decode", 16), ("prefill", 128), ("prefill", 1024))
HIDDEN, SUMS = 576, 2 * 30 + 1
_context = multiprocessing.get_context("spawn")


def serve(path: str, ranks: int, pipe: Connection) -> None:
    """One side: answers each kind of step with its seconds, and its message's."""
    from coppice import Engine, EngineConfig
    from cpu.steps import decode_steps, prefill_step

    engine = Engine(
        EngineConfig(
            model=path, tensor_parallel_size=ranks, kv_cache_tokens=16384,
            max_num_batched_tokens=1024,
        )
    )  # fmt: skip
    told: list[float] = []
    tell = engine.runner.followers.tell

    def timed(*arguments: Any) -> None:
        begun = time.perf_counter()
        tell(*arguments)
        told.append(time.perf_counter() - begun)

    engine.runner.followers.tell = timed  # type: ignore[method-assign]
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        step, size, seed = asked
        told.clear()
        if step == "prefill":
            found = prefill_step(engine, size, seed)[0]
        else:
            found = statistics.median(decode_steps(engine, size, 128, 16, 16))
        pipe.send((found, statistics.median(told) if told else 0.0))
    engine.close()


def add_up(descriptor: int, rank: int, room: int, times: int) -> float:
    """Microseconds of a sum of one row."""
    import numpy as np

    from coppice.kernels.cpu.ranks.memory import RankMemory

    memory, row = RankMemory(descriptor, rank, 2, room), np.zeros(HIDDEN, np.float32)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    memory.sum(row)
    begun = time.perf_counter()
    for _ in range(times):
        memory.sum(row)
    taken = time.perf_counter() - begun
    os.sched_setaffinity(0, cores)
    return 1e6 * taken / times


def microseconds_of_a_sum() -> float:
    from coppice.kernels.cpu.ranks.memory import region_bytes, shared_file

    room = region_bytes(HIDDEN)
    descriptor = shared_file(2, room)
    child = os.fork()
    found = add_up(descriptor, 1 if child else 0, room, 20_000)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "coppice")
    options.add_argument("--stored", choices=("float32", "bfloat16"), default="float32")
    args = options.parse_args()
    path = str(checkpoint("S", args.cache, args.stored))
    pipes, processes = {}, []
    for ranks in SIDES:
        pipes[ranks], theirs = _context.Pipe()
        processes.append(_context.Process(target=serve, args=(path, ranks, theirs)))
        processes[-1].start()
        assert pipes[ranks].recv() == "ready"
    rows, plans, decodes = Rows(args.json), [], []
    for step, size in STEPS:
        ratios = []
        for seed in range(4 if args.quick else 11):
            took = {}
            for ranks in SIDES[::-1] if seed % 2 else SIDES:
                pipes[ranks].send((step, size, seed))
                took[ranks], plan = pipes[ranks].recv()
                if ranks == 2 and step == "decode" and size == 1:
                    plans.append(plan)
                    decodes.append(took[ranks])
            if seed:  # the first takes memory
                ratios.append(took[1] / took[2])
        rows.add(
            benchmark="ranks", ranks=2, step=step, size=size, weights=args.stored,
            speed=spread(ratios), **machine(),
        )  # fmt: skip
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()
    one = statistics.median(decodes)
    rows.add(
        benchmark="ranks", ranks=2, step="decode", size=1, weights=args.stored,
        plan_share=round(statistics.median(plans) / one, 4),
        sums_share=round(SUMS * microseconds_of_a_sum() / 1e6 / one, 4), sums=SUMS, **machine(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
