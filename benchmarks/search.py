"""Beam search in the engine, beside transformers' beam search and beside plain decoding.

    python benchmarks/search.py [--quick] [--json FILE] [--rounds N]

The model has random weights in the shape of a 135M-parameter Llama. Each round draws a prompt of
512 tokens and searches 32 tokens with 4 beams; all sides run in turn on the same prompt. Rows:

    transformers' time over the engine's, and the number of equal results
    a step of the search, over a step of 4 plain decodes of the same length
    the most pages in use, over the pages of 4 separate sequences
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from common.harness import Rows, machine, parser, spread
from coppice import Engine, EngineConfig, SamplingParams
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from serving import small_llama


def search(engine: Engine, prompt: list[int], params: BeamSearchParams) -> dict[str, Any]:
    """Runs one beam search; returns its results, seconds, seconds by step, and most pages held."""
    engine.reset_cache()
    start = time.perf_counter()
    engine.add_beam_search("search", prompt, params)
    outputs, steps, pages = [], [], 0
    while engine.has_unfinished():
        begin = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - begin)
        pages = max(pages, make_report(engine).pages_held)
    tokens = [list(output.new_token_ids) for output in outputs]
    return {"seconds": sum(steps), "tokens": tokens, "steps": steps[2:], "pages": pages,
            "total": time.perf_counter() - start}  # fmt: skip


def decode(engine: Engine, prompt: list[int], width: int, tokens: int) -> list[float]:
    """Seconds of each step in which `width` plain sequences of one prompt decode."""
    engine.reset_cache()
    params = SamplingParams(n=width, temperature=1.0, seed=0, max_tokens=tokens, ignore_eos=True)
    engine.add_request("plain", prompt, params)
    steps = []
    while engine.has_unfinished():
        begin = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - begin)
    return steps[2:]


@torch.inference_mode()
def transformers_search(
    model: Any, prompt: list[int], params: BeamSearchParams
) -> tuple[float, list[list[int]]]:
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return time.perf_counter() - start, out[:, len(prompt) :].tolist()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=4, help="beams (default: 4)")
    options.add_argument("--rounds", type=int)
    args = options.parse_args()
    rounds = args.rounds or (1 if args.quick else 5)
    length, out = (64, 8) if args.quick else (512, 32)
    params = BeamSearchParams(args.width, out, ignore_eos=True)
    rows = Rows(args.json)
    with tempfile.TemporaryDirectory() as directory:
        path = small_llama(Path(directory), args.quick)
        engine = Engine(
            EngineConfig(model=str(path), dtype="float32", kv_cache_tokens=8192, max_num_seqs=16)
        )
        peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        rng = np.random.default_rng(0)
        ratios, steps, pages, same = [], [], [], 0
        for round_ in range(-1, rounds):  # round -1 warms up
            prompt = rng.integers(0, 32_000, length).tolist()
            ours = search(engine, prompt, params)
            plain = decode(engine, prompt, args.width, out)
            theirs, tokens = transformers_search(peer, prompt, params)
            if round_ < 0:
                continue
            ratios.append(theirs / ours["seconds"])
            steps.append(statistics.median(ours["steps"]) / statistics.median(plain))
            separate = args.width * -(-(length + out) // engine.config.page_size)
            pages.append(ours["pages"] / separate)
            same += ours["tokens"] == tokens
    shape = {"beams": args.width, "prompt": length, "out": out, "rounds": rounds}
    common = {"benchmark": "search", **shape}
    where = machine()
    rows.add(**common, ratio="transformers / engine", times_slower=spread(ratios, 2),
             same_results=f"{same} of {rounds}", machine=where)  # fmt: skip
    rows.add(**common, ratio="step of the search / step of as many decodes",
             times_slower=spread(steps, 3), machine=where)  # fmt: skip
    rows.add(**common, ratio="most pages / pages of separate sequences",
             share=spread(pages, 3), machine=where)  # fmt: skip


if __name__ == "__main__":
    main()
