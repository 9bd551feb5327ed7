"""What each number format of weights and cache costs in quality, and what it brings.

    python benchmarks/quality.py --model DIR [--modes int8 ...] [--rounds N] [--json FILE] [--quick]
        [--transformers]

Every mode is compared with the same engine in float32, on one text (`common/public_text.py`: prose
and code that Python's installation holds, 20 windows of 1,024 tokens). A row has

- `perplexity`, and `perplexity_more`, its ratio to float32's less one;
- `same_best`: the share of the text's positions at which the likeliest token is float32's;
- `greedy`: of 100 prompts of 64 tokens, each continued by 64, the share of texts that are
  float32's, and the median place of the first token that is not, among the others;
- `answers`: the share of the demo model's answers that are right, and how many it gave
  (`demo_accuracy.py`), where the demo can be loaded so;
- `weights`: bytes of the weights in memory beside float32's, which stay in 16 bits on a CPU if the
  checkpoint has them so;
- `speed`: float32's time over this mode's, as least, median and most of rounds that run in turn:
  `prefill` (4 prompts of 512 tokens), `decode_1` and `decode_16` (64 tokens for 1 and 16 requests).

With `--transformers`, a row `transformers` says the same of transformers' own bfloat16 on a CPU,
and the row of bfloat16 also compares with it (`beside_transformers`).

A mode that does not run here has a row with the reason (`refused`).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.harness import Rows, machine, parser, spread
from common.public_text import Text, public_text
from coppice import LLM, SamplingParams
from coppice.frontend.demo.facts import ask
from demo_accuracy import DEFAULT_MODEL, SCORED_TURNS, TURNS, fresh_document

REFERENCE = "float32"
#: The options of the engine for each mode.
MODES: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, float32-kv": {"dtype": "bfloat16", "kv_cache_dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "bfloat16-kv": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    # 16 bits, in which a GPU computes with it.
    "fp8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    windows: int = 20
    prompts: int = 100
    conversations: int = 100
    rounds: int = 5


@dataclass(slots=True)
class Quality:
    """What one engine makes of the text and the prompts."""

    perplexity: float
    best: list[int] = field(repr=False)
    texts: list[tuple[int, ...]] = field(repr=False)


def engine(model: Path, mode: str) -> LLM:
    """The model in a mode. Raises ``ValueError`` where the mode does not run."""
    return LLM(str(model), kv_cache_tokens=64 * _LENGTH, **MODES[mode])


def quality(llm: LLM, text: Text, prompts: int) -> Quality:
    """The perplexity of the text, its likeliest tokens, and greedy texts."""
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    loss, best = 0.0, []
    for window in text.windows:
        (output,) = llm.generate([list(window)], score, use_tqdm=False)
        for token, found in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            loss -= found[token].logprob
            best.append(next(id for id, each in found.items() if each.rank == 1))
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(_starts(text, prompts), greedy, use_tqdm=False)
    texts = [tuple(output.outputs[0].token_ids) for output in outputs]
    return Quality(math.exp(loss / len(best)), best, texts)


def transformers_quality(model: Path, text: Text, prompts: int) -> Quality:
    """The same of transformers' model, all of it in bfloat16."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    loss, best = 0.0, []
    texts: list[tuple[int, ...]] = []
    with torch.inference_mode():
        for window in text.windows:
            ids = torch.tensor([list(window)])
            found = theirs(ids).logits[0, :-1].float()
            loss += float(torch.nn.functional.cross_entropy(found, ids[0, 1:], reduction="sum"))
            best += found.argmax(-1).tolist()
        starts = torch.tensor(_starts(text, prompts))
        for part in starts.split(25):
            made = theirs.generate(
                part, attention_mask=torch.ones_like(part), do_sample=False, max_new_tokens=64,
                min_new_tokens=64, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            texts += [tuple(row) for row in made[:, part.shape[1] :].tolist()]
    return Quality(math.exp(loss / len(best)), best, texts)


def _starts(text: Text, prompts: int) -> list[list[int]]:
    each = -(-prompts // len(text.windows))
    starts = [
        list(window[at * 128 : at * 128 + 64]) for window in text.windows for at in range(each)
    ]
    return starts[:prompts]


def agreement(mine: Quality, reference: Quality) -> dict[str, Any]:
    """How often a mode says what float32 says."""
    firsts = [
        next(at for at, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
        for a, b in zip(mine.texts, reference.texts, strict=True)
        if a != b
    ]
    pairs = zip(mine.best, reference.best, strict=True)
    return {
        "perplexity": round(mine.perplexity, 4),
        "perplexity_more": round(mine.perplexity / reference.perplexity - 1, 5),
        "same_best": round(sum(a == b for a, b in pairs) / len(mine.best), 4),
        "greedy": {
            "prompts": len(mine.texts),
            "same": round(1 - len(firsts) / len(mine.texts), 3),
            "first_other": statistics.median(firsts) if firsts else None,
        },
    }


def answers(mode: str, conversations: int) -> dict[str, Any]:
    """The share of the demo model's right answers, as `demo_accuracy.py` scores them."""
    try:
        llm = engine(DEFAULT_MODEL, mode)
    except ValueError as error:
        return {"refused": str(error)}
    params = SamplingParams(temperature=0, max_tokens=16)
    with llm:
        tokenizer = llm.get_tokenizer()
        documents = [fresh_document(tokenizer, seed) for seed in range(conversations)]
        talks: list[list[Any]] = [[{"role": "system", "content": d.text}] for d in documents]
        right = 0
        asked = [ask(each, seed, TURNS) for seed, each in enumerate(documents)]
        for turn in range(TURNS):
            for talk, questions in zip(talks, asked, strict=True):
                talk.append({"role": "user", "content": questions[turn].text})
            outputs = llm.chat(talks, params, use_tqdm=False)
            for talk, questions, output in zip(talks, asked, outputs, strict=True):
                said = output.outputs[0].text
                talk.append({"role": "assistant", "content": said})
                right += turn + 1 in SCORED_TURNS and said == questions[turn].answer
    questions_asked = conversations * len(SCORED_TURNS)
    return {"questions": questions_asked, "right": round(right / questions_asked, 4)}


def workloads(text: Text) -> dict[str, Callable[[LLM], object]]:
    """What is timed, by name."""

    def run(prompts: Sequence[Sequence[int]], tokens: int) -> Callable[[LLM], object]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return lambda llm: llm.generate([list(each) for each in prompts], params, use_tqdm=False)

    many = [window[at : at + 16] for window in text.windows for at in range(0, 256, 16)]
    return {
        "prefill": run([window[:512] for window in (text.windows * 4)[:4]], 1),
        "decode_1": run(many[:1], 64),
        "decode_16": run(many[:16], 64),
    }


def speed(llm: LLM, reference: LLM, text: Text, rounds: int) -> dict[str, Any]:
    """float32's time over this mode's for each workload, in turn."""
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, work in workloads(text).items():
            taken = []
            for each in (llm, reference) if turn % 2 else (reference, llm):
                each.reset_prefix_cache()
                begin = time.perf_counter()
                work(each)
                taken.append(time.perf_counter() - begin)
            mine, other = taken if turn % 2 else reversed(taken)
            if turn:  # the first one warms up
                ratios.setdefault(name, []).append(other / mine)
    return {name: spread(found, 2) for name, found in ratios.items()}


def weight_bytes(llm: LLM) -> int:
    """Bytes of the weights as they lie in memory; what has several names counts once."""
    decoder = llm._text_engine.engine.runner.decoder
    found: dict[int, int] = {}
    for module in decoder.modules():
        packed = getattr(module, "packed", None)
        if packed is not None:
            found[packed.address] = packed.memory.nbytes
        for tensor in module.parameters(recurse=False):
            found[tensor.data_ptr()] = tensor.nbytes
    return sum(found.values())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    options.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options.add_argument("--rounds", type=int, default=5, help="of the speeds; 0: not measured")
    options.add_argument("--label", help="what the rows say of this build, such as its commit")
    options.add_argument("--transformers", action="store_true", help="its bfloat16 beside ours")
    args = options.parse_args()
    sizes = Sizes(2, 4, 2, min(args.rounds, 1)) if args.quick else Sizes(rounds=args.rounds)
    rows = Rows(args.json)
    common: dict[str, Any] = {"benchmark": "quality", "model": args.model.name}
    if args.label:
        common["label"] = args.label
    with engine(args.model, REFERENCE) as reference:
        encode = reference.get_tokenizer()
        text = public_text(lambda each: encode(each)["input_ids"], sizes.windows, _LENGTH)
        common |= {"text": text.digest, "tokens": sizes.windows * _LENGTH, "machine": machine()}
        expected = quality(reference, text, sizes.prompts)
        theirs = None
        if args.transformers:
            theirs = transformers_quality(args.model, text, sizes.prompts)
            rows.add(mode="transformers", **agreement(theirs, expected), **common)
        for mode in args.modes:
            row: dict[str, Any] = {"mode": mode}
            if mode == REFERENCE:
                row |= agreement(expected, expected)
                row["answers"] = answers(mode, sizes.conversations)
                rows.add(**row, **common)
                continue
            try:
                llm = engine(args.model, mode)
            except ValueError as error:
                rows.add(**row, refused=str(error), **common)
                continue
            with llm:
                mine = quality(llm, text, sizes.prompts)
                row |= agreement(mine, expected)
                if theirs is not None and mode == "bfloat16":
                    row["beside_transformers"] = agreement(mine, theirs)
                row["weights"] = round(weight_bytes(llm) / weight_bytes(reference), 3)
                if sizes.rounds:
                    row["speed"] = speed(llm, reference, text, sizes.rounds)
            del llm
            gc.collect()
            row["answers"] = answers(mode, sizes.conversations)
            rows.add(**row, **common)


if __name__ == "__main__":
    main()
