"""The parts of `gpu.py`: what each measures, and its time limit."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from common.harness import machine
from coppice.runtime.engine.core import Engine
from coppice.runtime.model.linear import select
from coppice.runtime.report.gather import make_stats
from gpu_suite.bench import (
    Bench,
    line_params,
    product_flop,
    sharing,
    token_bytes,
    weight_bytes,
)
from gpu_suite.beside import must_exit, run_transformers
from gpu_suite.rows import row_kernels
from gpu_suite.shapes import QUICK, REAL, Forked, Shared
from gpu_suite.trace import NAMED, ON_CPU, ON_GPU, a_step, busy, longest
from gpu_suite.worker import Plan, Row, serve_parts

#: Steps under the profiler.
PROFILED = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A name, the function that measures, and the seconds after which it yields what it has."""

    name: str
    seconds: float
    measure: Callable[[Bench, float], Iterator[Row]]


def all_parts() -> list[Part]:
    """The most wanted first; parts that share an engine are neighbours."""
    big, small = "Llama-3.1-8B", "Qwen3-0.6B"
    made = [Part("roofs", 30, roofs)]
    for model, scale in ((big, 1.0), (small, 0.5)):
        made += [
            _part(f"start, {model}", 150, start, model),
            _part(f"decode, {model}", 60 * scale, decode, model),
            _part(f"prefill, {model}", 20, prefill, model),
            _part(f"system prompt, {model}", 40 * scale, system_prompt, model),
            _part(f"samples, {model}", 20, samples, model),
            _part(f"beams, {model}", 20, beams, model),
            _part(f"beside transformers, {model}", 60 * scale, beside, model),
            _part(f"system prompt without cache, {model}", 100 * scale, uncached, model),
        ]
    made.append(_part(f"decode in fp8, {big}", 45, decode_fp8, big))
    made.append(Part("rows", 25, row_kernels))
    made.append(_part(f"triton instead, {big}", 90, triton_instead, big))
    return made


def measure(connection: Connection, plan: Plan) -> None:
    """Measures the parts of a plan, in the process that `run_parts` starts."""
    ends = time.perf_counter() + plan.limit
    bench = Bench(QUICK if plan.quick else REAL, plan.folder, quick=plan.quick)
    bench.roofs = dict(plan.roofs)
    where = machine()
    if plan.quick:
        where.pop("gpu", None)

    def run(part: Part) -> Iterator[Row]:
        return part.measure(bench, min(time.perf_counter() + part.seconds, ends))

    parts = {part.name: partial(run, part) for part in all_parts()}
    serve_parts(connection, plan, parts, bench, common={"machine": where}, must_exit=must_exit)


def _part(
    name: str, seconds: float, measure: Callable[[Bench, float, str], Iterator[Row]], model: str
) -> Part:
    return Part(name, seconds, lambda bench, deadline: measure(bench, deadline, model))


def roofs(bench: Bench, deadline: float) -> Iterator[Row]:
    """Measures a copy (reads and writes count) and a product in bfloat16."""
    source = torch.empty(bench.sizes.copied // 4, dtype=torch.int32, device=bench.device).fill_(1)
    target = torch.empty_like(source)
    side = bench.sizes.side
    a, b = torch.randn(2, side, side, device=bench.device).bfloat16()
    # The best of several rounds: at first the clocks are those of an idle chip.
    copied = 2 * source.nbytes / min(bench.seconds(lambda: target.copy_(source), 20) for _ in "123")
    flop = 2 * side**3 / min(bench.seconds(lambda: a @ b, 20) for _ in "123")
    bench.roofs = {"copy": copied, "product": flop}
    times = {"copy_gb_per_s": round(copied / 1e9, 1), "product_tflop_per_s": round(flop / 1e12, 1)}
    yield {"benchmark": "roofs", "times": times}


def start(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Makes the engine, and compiles all kernels by running each kind of request."""
    began = time.perf_counter()
    engine = bench.engine(model)
    bench.synchronize()
    made = time.perf_counter()
    size = bench.sizes
    few = min(4, size.max_num_seqs)
    for on in (True, False):
        with sharing(on):
            stem = bench.prompt(size.system_prompt.shared)
            bench.run(engine, [stem + bench.prompt(9) for _ in range(few)], 6, deadline)
            bench.run(engine, [stem], 6, deadline, lines=few)
            bench.run(engine, [stem], 6, deadline, beams=2)
            engine.reset_cache()
    ready = time.perf_counter()
    yield {
        "benchmark": "start",
        "memory": engine.memory,
        "attention": engine.runner.attention.name,
        "times": {"make_s": round(made - began, 2), "first_requests_s": round(ready - made, 2)},
    }


def decode(bench: Bench, deadline: float, model: str, **options: Any) -> Iterator[Row]:
    """Measures steady decoding beside its floor, and the gaps between its kernels."""
    for batch in bench.sizes.batches:
        engine = bench.engine(model, **options)
        row = steady(bench, deadline, engine, batch, bench.sizes.context)
        yield row | options
        if "times" not in row:
            return
        if time.perf_counter() < deadline:
            yield _gaps(bench, engine, batch, row["times"]["step_ms"] / 1e3) | options


def begin(
    bench: Bench, engine: Engine, batch: int, context: int, out: int, deadline: float
) -> bool:
    """Starts requests of `out` tokens; returns whether all decode before the deadline."""
    for number in range(batch):
        engine.add_request(str(number), bench.prompt(context), line_params(out))
    begun: set[str] = set()
    while len(begun) < batch and time.perf_counter() < deadline:
        begun.update(output.request_id for output in stepped(engine))
    return len(begun) == batch


def steady(bench: Bench, deadline: float, engine: Engine, batch: int, context: int) -> Row:
    """Decodes with as many sequences, beside the time of reading weights and KV."""
    steps = bench.sizes.steps
    # No request may end while others begin, or while steps are measured.
    beginning = 2 * batch * context // bench.sizes.max_num_batched_tokens
    if not begin(bench, engine, batch, context, beginning + 4 * (steps + PROFILED), deadline):
        return {"benchmark": "decode", "batch": batch, "context": context, "cut": True}
    for _ in range(4):
        stepped(engine)
    before = make_stats(engine).decode_steps
    lengths = [len(sequence.tokens) for sequence in engine.scheduler.running]
    bench.synchronize()
    began, done, tokens = time.perf_counter(), 0, 0
    while not done or (done < steps and time.perf_counter() < deadline):
        tokens += sum(len(output.new_token_ids) for output in stepped(engine))
        done += 1
    bench.synchronize()
    seconds = (time.perf_counter() - began) / done
    cached = sum(lengths) + batch * done / 2
    floor = (weight_bytes(engine) + cached * token_bytes(engine)) / bench.roofs["copy"]
    return {
        "benchmark": "decode",
        "batch": batch,
        "context": context,
        **({"cut": True} if done < steps else {}),
        # Steps as graphs, and kernel by kernel by reason; empty without graphs.
        "steps": {how: n - before[how] for how, n in make_stats(engine).decode_steps.items()},
        "of_floor": float(f"{floor / seconds:.3g}"),
        "goal": 0.85,
        "times": {
            "tokens_per_s": round(tokens / done / seconds, 1),
            "step_ms": round(seconds * 1e3, 3),
            "floor_ms": round(floor * 1e3, 3),
        },
    }


def stepped(engine: Engine) -> list[Any]:
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
    return outputs


def _gaps(bench: Bench, engine: Engine, batch: int, step_seconds: float) -> Row:
    """How long the GPU waits for the CPU in a step of `step_seconds`, timed without a profiler.

    A profiler slows the CPU down but hardly the kernels. So the busy share is the kernels' time
    under the profiler, over a step's time without it.
    """
    on_gpu = bench.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CUDA if on_gpu else activity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            stepped(engine)
        bench.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        kinds = ON_GPU if on_gpu else ON_CPU
        found, names = busy(trace, kinds), longest(trace, kinds, NAMED)
    return {
        "benchmark": "gaps",
        "batch": batch,
        "kernels_a_step": round(found.pieces / PROFILED, 1),
        "busy": round(min(1.0, found.busy / PROFILED / 1e6 / step_seconds), 3),
        "busy_under_profiler": round(found.busy / found.span, 3),
        "goal": 0.97,
        "times": {
            "busy_us_a_step": round(found.busy / PROFILED, 1),
            "median_gap_us": round(found.median_gap, 2),
            "longest_gap_us": round(max(found.gaps, default=0.0), 1),
            "kernels": a_step(names, PROFILED),
        },
    }


def decode_fp8(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Decoding with weights and activations in 8-bit floats."""
    if bench.quick:  # torch 2.13 and later multiply these types on a CPU, too
        select._check_fp8_device = lambda device: None
        if torch.__version__ < "2.13":
            yield {"left_out": f"torch {torch.__version__} has no such product for a CPU"}
            return
    yield from decode(bench, deadline, model, quantization="fp8")


def triton_instead(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Measures decoding and the system prompt on Triton, if the other parts ran on FlashInfer."""
    if bench.quick or importlib.util.find_spec("flashinfer") is None:
        yield {"left_out": "FlashInfer is not installed, or this is no GPU: it measured nothing"}
        return
    yield from decode(bench, deadline, model, attention_backend="triton")
    yield _system_prompt(bench, deadline, model, True, attention_backend="triton")


def prefill(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Measures long prompts, none of them cached, beside the rate of a large product."""
    engine = bench.engine(model)
    tokens, count = bench.sizes.prefill, bench.sizes.prefills
    bench.run(engine, [bench.prompt(tokens)], 1, deadline)
    ran = bench.run(engine, [bench.prompt(tokens) for _ in range(count)], 1, deadline)
    shape = engine.model_config
    pairs = tokens * (tokens + 1) // 2
    layers, head = product_flop(engine)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    flop = ran.tokens * (tokens * layers + head + attention)  # each prompt gives one token
    yield {
        "benchmark": "prefill",
        "tokens": tokens,
        "of_product": round(flop / ran.seconds / bench.roofs["product"], 3),
        **ran.row(),
    }


def system_prompt(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Measures requests with one system prompt, whose KV is read once for all, or by each."""
    for on in (True, False):
        yield _system_prompt(bench, deadline, model, on)


def uncached(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Measures the same requests with the cache off."""
    yield _system_prompt(bench, deadline, model, False, enable_prefix_caching=False)


def _system_prompt(bench: Bench, deadline: float, model: str, shared: bool, **options: Any) -> Row:
    engine = bench.engine(model, **options)
    with sharing(shared):
        what = bench.sizes.system_prompt
        prompts = _with_system_prompt(bench, what)
        ran = bench.run(engine, prompts, what.out, deadline)
    return {
        "benchmark": "system prompt",
        "sharing": shared,
        "enable_prefix_caching": options.pop("enable_prefix_caching", True),
        **options,
        "hit_rate": round(ran.hits / sum(map(len, prompts)), 3),
        **ran.row(),
    }


def _with_system_prompt(bench: Bench, what: Shared) -> list[list[int]]:
    stem = bench.prompt(what.shared)
    return [stem + bench.prompt(what.own) for _ in range(what.requests)]


def samples(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Measures several samples of each prompt."""
    size = bench.sizes.samples
    row = {"benchmark": "samples", "n": size.lines}
    yield from _forked(bench, deadline, model, size, row, lines=size.lines)


def beams(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Measures beam searches; the tokens of all lines count."""
    size = bench.sizes.beams
    row = {"benchmark": "beams", "width": size.lines}
    yield from _forked(bench, deadline, model, size, row, beams=size.lines)


def _forked(
    bench: Bench, deadline: float, model: str, size: Forked, row: Row, **options: int
) -> Iterator[Row]:
    for on in (True, False):
        engine = bench.engine(model)
        prompts = [bench.prompt(size.prompt) for _ in range(size.requests)]
        with sharing(on):
            ran = bench.run(engine, prompts, size.out, deadline, **options)
        yield {**row, "sharing": on, **ran.row()}


def beside(bench: Bench, deadline: float, model: str) -> Iterator[Row]:
    """Measures the engine, then transformers' continuous batching, on the same weights."""
    what = bench.sizes.beside
    prompts = _with_system_prompt(bench, what)
    engine = bench.engine(model)
    ours = bench.run(engine, prompts, what.out, deadline)
    yield {"benchmark": "beside transformers", "side": "coppice", **ours.row()}
    path, decoder = Path(engine.config.model), engine.runner.decoder
    del engine
    bench.drop()
    theirs = run_transformers(path, decoder, prompts, what.out, deadline)
    firsts = [(ours.lines[name][:1], line[:1]) for name, line in theirs.lines.items() if line]
    yield {
        "benchmark": "beside transformers",
        "side": "transformers",
        # bfloat16 products round differently, so some differ; with other weights all would.
        "same_first_tokens": round(sum(a == b for a, b in firsts) / max(1, len(firsts)), 3),
        **theirs.row(),
    }
