"""The steps that `gpu_compare.py` compares: long contexts in graphs, mixed steps, an fp8 cache."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from coppice.runtime.report.gather import make_stats
from gpu_suite.bench import Bench, line_params
from gpu_suite.parts import PROFILED, begin, steady, stepped
from gpu_suite.shapes import FEW_LAYERS
from gpu_suite.trace import NAMED, ON_CPU, ON_GPU, a_step, busy, longest
from gpu_suite.worker import Row

#: Sequences that decode and their tokens.
LONG = ((32, 8192), (64, 32768), (256, 8192))
#: Sequences that decode, their tokens, and those of the prompt that begins in each step.
MIXED = (32, 512, 200)
EIGHT_BITS = (64, 4096)
_STEPS = 32


def long_contexts(bench: Bench, deadline: float) -> Iterator[Row]:
    """Decoding steps of a model with few layers; none may fall back to single kernels."""
    for batch, context in ((2, 60), (3, 40)) if bench.quick else LONG:
        engine = bench.engine(FEW_LAYERS)
        row = steady(bench, deadline, engine, batch, context)
        ran = row.get("steps", {})
        fell = {how: count for how, count in ran.items() if how != "graph" and count}
        yield {**row, "benchmark": "decode graphs", "fell_back": fell, "goal": {"fell_back": {}}}


def mixed_steps(bench: Bench, deadline: float) -> Iterator[Row]:
    """Steps in which sequences decode and a prompt begins: as graphs, and kernel by kernel."""
    batch, context, chunk = (3, 20, 12) if bench.quick else MIXED
    for eager in (False, True):
        if time.perf_counter() > deadline:
            yield {"benchmark": "mixed step", "eager": eager, "left_out": "the time was over"}
            continue
        engine = bench.engine("Qwen3-0.6B", **({"enforce_eager": True} if eager else {}))
        if not begin(bench, engine, batch, context, 10 * (_STEPS + PROFILED), deadline):
            yield {"benchmark": "mixed step", "eager": eager, "cut": True}
            continue
        number = 0

        def step() -> None:
            nonlocal number
            engine.add_request(f"prompt {number}", bench.prompt(chunk), line_params(1))  # noqa: B023
            number += 1
            stepped(engine)  # noqa: B023

        for _ in range(4):
            step()
        bench.synchronize()
        before, seconds = make_stats(engine).mixed_steps, []
        for _ in range(4 if bench.quick else _STEPS):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        bench.synchronize()
        ran = {how: count - before[how] for how, count in make_stats(engine).mixed_steps.items()}
        on_gpu = bench.device.type == "cuda"
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as made:
            for _ in range(PROFILED):
                step()
            bench.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            made.export_chrome_trace(str(trace))
            kinds = ON_GPU if on_gpu else ON_CPU
            found, names = busy(trace, kinds), longest(trace, kinds, NAMED)
        for each in range(number):
            engine.abort(f"prompt {each}")
        yield {
            "benchmark": "mixed step",
            "eager": eager,
            "batch": batch,
            "context": context,
            "chunk": chunk,
            "steps": ran,
            "kernels_a_step": round(found.pieces / PROFILED, 1),
            "busy_under_profiler": round(found.busy / found.span, 3),
            "times": {
                "step_ms": round(1e3 * statistics.median(seconds), 3),
                "busy_us_a_step": round(found.busy / PROFILED, 1),
                "median_gap_us": round(found.median_gap, 2),
                "kernels": a_step(names, PROFILED),
            },
        }


def eight_bit_cache(bench: Bench, deadline: float) -> Iterator[Row]:
    """Decoding over caches of both types."""
    batch, context = (3, 40) if bench.quick else EIGHT_BITS
    rates = []
    for kind in ("auto", "fp8"):
        engine = bench.engine("Llama-3.1-8B", kv_cache_dtype=kind)
        row = steady(bench, deadline, engine, batch, context)
        del engine  # the next one needs its memory
        if "times" in row:
            rates.append(row["times"]["tokens_per_s"])
        ratio = {"ratio": round(rates[-1] / rates[0], 3)} if len(rates) == 2 else {}
        yield {**row, "benchmark": "fp8 cache, decode", "kv_cache_dtype": kind, **ratio}
