"""Inter-token latency of chats in the real engine while a long prompt is prefilled beside them.

    python benchmarks/latency.py [--quick] [--json FILE] [--rounds N] [--clock wall|process]
        [--drafts]

16 chats of 64 tokens decode. When each has 100 tokens, a prompt of 16,384 tokens arrives; the run
ends 100 tokens after that prompt's first token. Weights are random, in the shape of a small Llama.
Each round runs two sides in turn: with the server's `max_step_stretch`, which limits how long a
prefill may make a step, and without a limit. All gaps between two tokens of a chat count. With
`--clock process`, times are the process's processor time, summed over its threads: for a single
thread on a machine that others use as well. No drafts are made without `--drafts`: texts of random
weights repeat themselves, and far more drafts of them are right than of a real model's. A row has
the spread over the rounds of

    itl_p99_over_p50            of all gaps
    itl_p99_over_undisturbed    p99 of all gaps, over the median gap before the long prompt came
    itl_worst_over_undisturbed  the longest gap, over the same
    ttft_over_unlimited         the long prompt's time to first token, over that without a limit
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.harness import Rows, machine, parser, spread
from coppice import Engine, EngineConfig, SamplingParams
from coppice.frontend.router.cluster.settings import SERVER_DEFAULTS
from coppice.runtime.schedule.chunks import Schedule
from coppice.runtime.schedule.scheduler import Scheduler

_CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
_CHATS = 16
_ALONE = 100  # tokens of each chat before the long prompt arrives, and after its first token
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8_000,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_engine(
    directory: Path,
    hidden: int,
    length: int,
    stretch: float | None,
    clock: Callable[[], float],
    *,
    drafts: bool,
) -> Engine:
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden}
    (directory / "config.json").write_text(json.dumps(_LLAMA | shape))
    options = SERVER_DEFAULTS | {"max_step_stretch": stretch}
    engine = Engine(
        EngineConfig(
            model=str(directory),
            load_format="dummy",
            dtype="float32",
            kv_cache_tokens=2 * length + _CHATS * 16_384,
            max_model_len=length + 1024,
            speculation=None if drafts else "off",
            **options,
        )
    )
    _use_clock(engine.scheduler, clock)
    return engine


def _use_clock(scheduler: Scheduler, clock: Callable[[], float]) -> None:
    """Makes the scheduler learn the duration of steps by `clock`."""
    schedule, observe = scheduler.schedule, scheduler.observe
    began = 0.0

    def begin() -> Schedule:
        nonlocal began
        began = clock()
        return schedule()

    def timed(step: Schedule, _: float) -> None:
        observe(step, clock() - began)

    scheduler.schedule = begin  # type: ignore[method-assign]
    scheduler.observe = timed  # type: ignore[method-assign]


def disturbed_chats(
    engine: Engine, length: int, seed: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Serves the chats and the long prompt; returns ratios of gaps, its TTFT, and steps."""
    engine.reset_cache()
    rng = np.random.default_rng(seed)

    def add(name: str, tokens: int, out: int) -> None:
        prompt = rng.integers(3, 8_000, tokens).tolist()
        engine.add_request(
            name, prompt, SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        )

    for number in range(_CHATS):
        add(f"chat {number}", 64, length)
    last: dict[str, float] = {}
    gaps: list[float] = []
    quiet = came = answered = 0.0
    steps = left = 0
    for steps in itertools.count():
        if steps == _ALONE:
            quiet = float(np.median(gaps))
            add("long", length, 1)
            came = clock()
        outputs = engine.step()
        now = clock()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.request_id == "long":
                answered, left = now, steps + _ALONE
                continue
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
        if answered and steps == left:
            break
    for number in range(_CHATS):
        engine.abort(f"chat {number}")
    p50, p99 = np.percentile(gaps, 50), np.percentile(gaps, 99)
    return {
        "over_p50": float(p99 / p50),
        "over_undisturbed": float(p99 / quiet),
        "ttft": answered - came,
        "quiet": quiet,
        "worst": max(gaps) / quiet,
        "steps": steps,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="default: 5")
    options.add_argument("--clock", choices=_CLOCKS, default="wall", help="default: wall")
    options.add_argument("--drafts", action="store_true", help="let both sides make drafts")
    args = options.parse_args()
    clock = _CLOCKS[args.clock]
    rounds = args.rounds or (1 if args.quick else 5)
    length, hidden = (2_048, 128) if args.quick else (16_384, 512)
    stretch = SERVER_DEFAULTS["max_step_stretch"]
    rows = Rows(args.json)
    found: dict[float | None, list[dict[str, float]]] = {None: [], stretch: []}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        sides = {
            limit: make_engine(path, hidden, length, limit, clock, drafts=args.drafts)
            for limit in found
        }
        for round_ in range(-1, rounds):
            for limit, engine in sides.items():
                # Round -1 compiles kernels and allocates memory.
                row = disturbed_chats(engine, length if round_ >= 0 else 1024, round_ + 1, clock)
                if round_ >= 0:
                    found[limit].append(row)
    for limit, results in found.items():
        ttft = [
            each["ttft"] / other["ttft"] for each, other in zip(results, found[None], strict=True)
        ]
        measured: dict[str, Any] = {
            "itl_p99_over_p50": spread([each["over_p50"] for each in results], 2),
            "itl_p99_over_undisturbed": spread([each["over_undisturbed"] for each in results], 2),
            "itl_worst_over_undisturbed": spread([each["worst"] for each in results], 1),
            "ttft_over_unlimited": spread(ttft, 2),
            "times": {
                "ttft_s": spread([each["ttft"] for each in results]),
                "undisturbed_ms": spread([each["quiet"] * 1e3 for each in results]),
            },
        }
        rows.add(
            benchmark="latency", prompt=length, chats=_CHATS, rounds=rounds,
            max_step_stretch=limit, clock=args.clock, drafts=args.drafts, **measured,
            machine=machine(),
        )  # fmt: skip


if __name__ == "__main__":
    main()
