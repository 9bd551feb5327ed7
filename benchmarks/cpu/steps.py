"""Single steps of Coppice beside the least possible time, and where their time is spent.

    python benchmarks/cpu/steps.py CHECKPOINT PRECISION [--threads N] [--quick]

Measures decoding steps of 1 to 32 sequences that share a prefix and have own tokens, and chunks of
prefill. The steps run twice: first unchanged, which gives the time; then with clocks around the
projections (by name), norms, attention, writes to the cache, sampling and scheduling. `rest of
model` is the time outside these clocks: rotary embedding, activation, residuals, the embedding and
Python. A fused operation that replaces a module counts there, too. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python puts a script's own folder on the import path; this one needs the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from coppice import Engine, EngineConfig, SamplingParams
from coppice.runtime.sampling.sampler import Sampler
from cpu.floor import Shape, Step
from cpu.rates import Rates, measure
from cpu.workloads import Workload

ROWS = (1, 4, 8, 16, 32)
CHUNKS = (64, 256, 1024, 2048)


class Clocks:
    """Adds up the seconds of wrapped functions by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, method, timed)


def add_clocks(engine: Engine) -> Clocks:
    """Puts clocks around the parts of this engine's steps, permanently.

    If all layers are one compiled call, they run operation by operation from now on, which takes
    longer.
    """
    engine.runner.decoder.compiled = None
    clocks = Clocks()
    for name, module in engine.runner.decoder.named_modules():
        kind = type(module).__name__
        if "Linear" in kind:
            clocks.around(module, "forward", "projection " + name.rsplit(".", 1)[-1])
        elif "Norm" in kind:
            clocks.around(module, "forward", "norms")
    attention = engine.runner.attention
    clocks.around(attention, "attend", "attention")
    clocks.around(attention, "write_kv", "writing KV")
    clocks.around(attention, "prepare", "attention plan")
    clocks.around(engine.runner, "run", "model")
    clocks.around(Sampler, "sample", "sampling")
    clocks.around(engine.scheduler, "schedule", "scheduling")
    return clocks


def breakdown(clocks: Clocks, total: float, steps: int) -> dict[str, float]:
    """Milliseconds a step by name, the largest first; `rest of model` has no clock."""
    parts = dict(clocks.seconds)
    outside = ("sampling", "scheduling")
    model = parts.pop("model")
    known = sum(seconds for name, seconds in parts.items() if name not in outside)
    parts["rest of model"] = model - known
    parts["committing and the rest"] = total - model - sum(parts.get(name, 0.0) for name in outside)
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return {name: round(seconds / steps * 1e3, 3) for name, seconds in ordered}


def decode_steps(
    engine: Engine, rows: int, shared: int, own: int, count: int, clocks: Clocks | None = None
) -> list[float]:
    """Seconds of `count` steps in which `rows` sequences with a shared prefix decode."""
    engine.reset_cache()
    rng = random.Random(rows)
    warm = 3  # steps after the prompts, in which memory is allocated
    params = SamplingParams(temperature=0, max_tokens=count + warm + 8, ignore_eos=True)
    jobs = Workload("step", rows, shared, own, 1).first(rng)
    for index, job in enumerate(jobs):
        engine.add_request(str(index), job.prompt, params)
    started: set[str] = set()
    while len(started) < rows:
        started |= {output.request_id for output in engine.step()}
    for _ in range(warm):
        engine.step()
    times = timed_steps(engine, count, clocks)
    for index in range(rows):
        engine.abort(str(index))
    return times


def prefill_step(
    engine: Engine, tokens: int, seed: int, clocks: Clocks | None = None
) -> list[float]:
    """Seconds of the step that computes a prompt of `tokens` tokens."""
    engine.reset_cache()
    job = Workload("step", 1, 0, tokens, 1).first(random.Random(f"{tokens} {seed}"))[0]
    engine.add_request("0", job.prompt, SamplingParams(temperature=0, max_tokens=1))
    return timed_steps(engine, 1, clocks)


def timed_steps(engine: Engine, count: int, clocks: Clocks | None) -> list[float]:
    """Seconds of `count` steps; the clocks count only these."""
    if clocks is not None:
        clocks.seconds.clear()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return times


def report(
    kind: str,
    size: int,
    step: Step,
    times: list[float],
    clocked: tuple[Clocks, list[float]],
    shape: Shape,
    precision: str,
    rates: Rates,
) -> None:
    floor = step.seconds(shape, precision, rates)
    row = {
        "benchmark": "cpu_steps",
        "precision": precision,
        "stored_bytes": shape.stored,
        "step": kind,
        "size": size,
        "times_the_floor": {
            "min": round(min(times) / floor, 2),
            "median": round(statistics.median(times) / floor, 2),
        },
        "times": {
            "floor_ms": round(floor * 1e3, 3),
            "min_ms": round(min(times) * 1e3, 3),
            "median_ms": round(statistics.median(times) * 1e3, 3),
            "by_part_ms": breakdown(clocked[0], sum(clocked[1]), len(clocked[1])),
        },
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("checkpoint", type=Path)
    options.add_argument("precision", choices=("float32", "bfloat16", "int8", "int4"))
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--quick", action="store_true")
    args = options.parse_args()
    shared, own, count = (128, 16, 4) if args.quick else (1024, 64, 24)
    rows, chunks = (ROWS[:2], CHUNKS[:1]) if args.quick else (ROWS, CHUNKS)
    rates = measure(args.threads)  # also sets torch's threads
    shape = Shape.of(args.checkpoint)
    engine = Engine(
        EngineConfig(
            model=str(args.checkpoint),
            dtype="bfloat16" if args.precision == "bfloat16" else "float32",
            quantization=args.precision if args.precision.startswith("int") else None,
            kv_cache_tokens=shared + max(rows) * (own + count + 64) + 4096,
            max_num_seqs=max(rows),
            max_num_batched_tokens=max(CHUNKS),
            speculation="off",  # a step computes one token of each sequence
        )
    )
    decodes = {size: decode_steps(engine, size, shared, own, count) for size in rows}
    prefills = {
        size: [prefill_step(engine, size, seed)[0] for seed in range(4)][1:] for size in chunks
    }
    clocks = add_clocks(engine)
    for size, times in decodes.items():
        again = decode_steps(engine, size, shared, own, count, clocks)
        # The mean number of cached tokens is that of the middle step.
        cached = shared + own + 3 + count // 2
        step = Step.of([1] * size, [cached] * size, shared)
        report("decode", size, step, times, (clocks, again), shape, args.precision, rates)
    for size, times in prefills.items():
        again = prefill_step(engine, size, 9, clocks)
        step = Step(size, 1, size * (size + 1) // 2, 0)
        report("prefill", size, step, times, (clocks, again), shape, args.precision, rates)


if __name__ == "__main__":
    main()
