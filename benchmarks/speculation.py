"""Drafts: tokens a step and time, with speculation and without, on texts that repeat.

Usage:
    .venv/bin/python benchmarks/speculation.py [--json FILE] [--quick] [--texts-only]
        [--model S --model M] [--quantization none --quantization int8] [--batch 1 --batch 4 ...]
        [--passes N] [--texts N] [--cache DIR] [--draft-model] [--right 0.8 ...]

A model with random weights is made to follow given texts: its logits are computed in full, then the
given token is taken. So the cost of steps is real, and what is accepted is that of the texts
(`drafts/texts.py`). Both sides are one engine, and run in turn: `gain` is the time without drafts
over the time with them, the median (least to most) of several passes. Each pass begins with an
index of no text and with what the engine has learned of its steps' time; each pass follows all
texts of a workload, `batch` at a time.

With `--draft-model` M is the model and S its draft model, which is made to foretell the texts, each
token with a given chance (`--right 0.6 --right 0.8`): the cost of its passes is real, and what it
foretells is given. Of each text the prompt is known to neither at the beginning of a pass.

With `--texts-only` no model runs: rows have the tokens a step where a step verifies at most a given
number of drafted tokens, beside looking up the last n-gram of the request itself.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Sequence as Seq
from itertools import product
from pathlib import Path
from typing import Any

from common.harness import Rows, machine, parser, processor, spread
from cpu.checkpoints import LENGTH, VOCABULARY, checkpoint
from drafts.followed import follow, guess
from drafts.texts import WORKLOADS
from drafts.tokenizer import trained
from drafts.without_model import index_tokens_a_step, lookup_tokens_a_step

CACHE = Path(__file__).resolve().parents[1] / "build" / "speculation"
BATCHES = (1, 4, 16, 32)
LONGEST = 512  # tokens of an answer that are followed
WIDTHS = (4, 8, 16)

Text = tuple[array, array]


def texts_of(workload: str, count: int, cache: Path) -> list[Text]:
    """Token ids of prompts and answers."""
    if workload == "random":
        rng = random.Random(5)
        return [
            tuple(array("i", (rng.randrange(3, VOCABULARY) for _ in range(n))) for n in (200, 128))
            for _ in range(count)
        ]  # type: ignore[misc]
    tokenizer = trained(cache)
    return [
        (
            array("i", tokenizer.encode(turn.prompt).ids),
            array("i", tokenizer.encode(turn.answer).ids[:LONGEST]),
        )
        for turn in WORKLOADS[workload](count)
    ]


def without_model(rows: Rows, names: Seq[str], count: int, cache: Path) -> None:
    for workload in names:
        texts = texts_of(workload, count, cache)
        for width in WIDTHS:
            rows.add(
                benchmark="speculation",
                what="tokens a step, without a model",
                workload=workload,
                drafted=width,
                texts=len(texts),
                index=round(index_tokens_a_step(texts, width), 3),
                lookup=round(lookup_tokens_a_step(texts, width), 3),
                machine=processor(),
            )


def with_model(rows: Rows, args: Any, names: Seq[str]) -> None:
    from coppice import Engine, EngineConfig

    for model in args.model:
        folder = checkpoint(model, args.cache)
        for quantization, right in product(args.quantization, args.right):
            engine = Engine(
                EngineConfig(
                    model=str(folder),
                    quantization=None if quantization == "none" else quantization,
                    max_model_len=LENGTH,
                    kv_cache_tokens=65_536,
                    max_num_seqs=64,
                    speculation="auto",
                    draft_model=None if right is None else str(checkpoint("S", args.cache)),
                )
            )
            drafts = engine.drafts
            for batch in args.batch:
                for workload in names:
                    texts = texts_of(workload, max(args.texts, batch), args.cache)
                    times: dict[bool, list[float]] = {True: [], False: []}
                    told = None
                    if right is not None:
                        guess(engine, texts, right)
                    for number in range(args.passes + 1):  # the first one is thrown away
                        for speculates in (True, False) if number % 2 else (False, True):
                            engine.speculate(drafts if speculates else None)
                            engine.reset_cache()
                            before = (
                                drafts.counts.rows,
                                drafts.counts.accepted,
                                drafts.counts.drafted,
                            )
                            gc.collect()
                            begun = time.perf_counter()
                            follow(engine, texts, batch)
                            seconds = time.perf_counter() - begun
                            if number:
                                times[speculates].append(seconds)
                            if speculates:
                                told = [
                                    after - was
                                    for after, was in zip(
                                        (
                                            drafts.counts.rows,
                                            drafts.counts.accepted,
                                            drafts.counts.drafted,
                                        ),
                                        before,
                                        strict=True,
                                    )
                                ]
                    ratios = [off / on for on, off in zip(times[True], times[False], strict=True)]
                    rows.add(
                        benchmark="speculation",
                        what="gain",
                        model=model,
                        quantization=quantization,
                        batch=batch,
                        workload=workload,
                        texts=len(texts),
                        gain=spread(ratios),
                        tokens_a_step=round(1 + told[1] / max(told[0], 1), 3),
                        accepted=round(told[1] / max(told[2], 1), 3),
                        **({} if right is None else {"draft_model": "S", "right": right}),
                        times={
                            "with": statistics.median(times[True]),
                            "without": statistics.median(times[False]),
                        },
                        machine=machine(),
                    )
            engine.close()
            del engine, drafts
            gc.collect()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--texts-only", action="store_true")
    options.add_argument("--model", action="append", choices=("S", "M"))
    options.add_argument("--quantization", action="append", choices=("none", "int8", "int4"))
    options.add_argument("--batch", action="append", type=int)
    options.add_argument("--workload", action="append", choices=(*WORKLOADS, "random"))
    options.add_argument("--draft-model", action="store_true")
    options.add_argument("--right", action="append", type=float)
    options.add_argument("--passes", type=int, default=5)
    options.add_argument("--texts", type=int, help="at least; 8 if not given")
    options.add_argument("--cache", type=Path, default=CACHE)
    args = options.parse_args()
    if args.right and not args.draft_model:
        options.error("--right is the draft model's: it needs --draft-model")
    if any(not 0.5 < right < 1 for right in args.right or ()):
        options.error("--right must be above 0.5 and below 1")
    if args.draft_model:
        args.model = args.model or ["M"]
        args.right = args.right or [0.6, 0.8]
        args.workload = args.workload or ["quotes", "chat", "random"]
    else:
        args.right = [None]
    args.texts = args.texts or (4 if args.quick else 8)
    args.cache.mkdir(parents=True, exist_ok=True)
    names = args.workload or [*WORKLOADS, "random"]
    rows = Rows(args.json)
    if not args.draft_model:
        without_model(rows, names, 4 if args.quick else 32, args.cache)
    if args.texts_only:
        return
    args.model = args.model or (["S"] if args.quick else ["S", "M"])
    args.quantization = args.quantization or (["none"] if args.quick else ["none", "int8"])
    args.batch = args.batch or ([1, 4] if args.quick else list(BATCHES))
    if args.quick:
        args.passes = 1
    with_model(rows, args, names)


if __name__ == "__main__":
    main()
