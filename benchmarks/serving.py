"""Requests with a shared prefix: cache on, cache off, and transformers' `generate`, in turn.

    python benchmarks/serving.py [--quick] [--json FILE] [--model DIR] [--rounds N]

All requests are submitted at once and decoded greedily past any end of sequence: by default 32
requests of 1,024 shared and 64 own tokens, 32 tokens out. Without --model the weights are random,
in the shape of a 135M-parameter Llama. Each round draws new tokens and runs all three sides on
them; the ratios are taken round by round.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from common.harness import Rows, machine, parser, spread
from coppice import Engine, EngineConfig, SamplingParams
from coppice.runtime.report.gather import make_report


def small_llama(directory: Path, quick: bool) -> Path:
    """Writes a Llama with random weights: 135M parameters (30 layers, hidden 576), or tiny."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=192 if quick else 576,
        intermediate_size=512 if quick else 1536,
        num_hidden_layers=4 if quick else 30,
        num_attention_heads=3 if quick else 9,
        num_key_value_heads=1 if quick else 3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def coppice_engine(model: Path, args: Any, caching: bool) -> Engine:
    length = args.shared + args.own + args.out
    return Engine(
        EngineConfig(
            model=str(model),
            dtype="float32",
            enable_prefix_caching=caching,
            kv_cache_tokens=args.requests * (length + 32),
            max_num_seqs=args.requests,
        )
    )


def run_coppice(engine: Engine, prompts: list[list[int]], out: int) -> dict[str, Any]:
    """Seconds until all requests are done, their median TTFT, their tokens, tokens computed."""
    engine.reset_cache()
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
    before = make_report(engine)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    tokens: dict[str, list[int]] = {}
    first: dict[str, float] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            first.setdefault(output.request_id, time.perf_counter() - start)
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    seconds = time.perf_counter() - start
    report = make_report(engine)
    return {
        "seconds": seconds,
        "ttft": sorted(first.values())[len(first) // 2],
        "tokens": [tokens[str(index)] for index in range(len(prompts))],
        "prompt_tokens_computed": report.computed_tokens - before.computed_tokens,
    }


@torch.inference_mode()
def run_transformers(model: Any, prompts: list[list[int]], out: int) -> dict[str, Any]:
    """Runs one batch; all prompts have the same length, so nothing is padded."""
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=out,
        min_new_tokens=out,
        pad_token_id=0,
        eos_token_id=None,
    )
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": result[:, ids.shape[1] :].tolist()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="folder of a checkpoint")
    options.add_argument("--requests", type=int)
    options.add_argument("--shared", type=int, help="shared tokens of each prompt")
    options.add_argument("--own", type=int, help="own tokens of each prompt")
    options.add_argument("--out", type=int, help="tokens generated for each")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--skip-transformers", action="store_true")
    args = options.parse_args()
    args.requests = args.requests or (8 if args.quick else 32)
    args.shared = args.shared or (256 if args.quick else 1024)
    args.own = args.own or (16 if args.quick else 64)
    args.out = args.out or (8 if args.quick else 32)

    with tempfile.TemporaryDirectory() as directory:
        model = args.model or small_llama(Path(directory), args.quick)
        vocabulary = AutoConfig.from_pretrained(model).vocab_size
        sides: dict[str, Any] = {
            "cache_on": coppice_engine(model, args, True),
            "cache_off": coppice_engine(model, args, False),
        }
        peer = None
        if not args.skip_transformers:
            peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        rows = Rows(args.json)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        if peer is not None:
            runs["transformers"] = []
        for round_ in range(-1, args.rounds):  # round -1 warms up, on few tokens
            rng = random.Random(round_)
            shared, own = (args.shared, args.own) if round_ >= 0 else (64, 16)
            out = args.out if round_ >= 0 else 4
            prefix = [rng.randrange(vocabulary) for _ in range(shared)]
            prompts = [
                prefix + [rng.randrange(vocabulary) for _ in range(own)]
                for _ in range(args.requests)
            ]
            for name, engine in sides.items():
                result = run_coppice(engine, prompts, out)
                if round_ >= 0:
                    runs[name].append(result)
            if peer is not None:
                result = run_transformers(peer, prompts, out)
                if round_ >= 0:
                    runs["transformers"].append(result)
            gc.collect()

    workload = {name: getattr(args, name) for name in ("requests", "shared", "own", "out")}
    for name, results in runs.items():
        row: dict[str, Any] = {"side": name}
        times = {"seconds": spread([r["seconds"] for r in results])}
        if name != "transformers":
            times["ttft_median_s"] = spread([r["ttft"] for r in results])
            row["prompt_tokens_computed"] = results[0]["prompt_tokens_computed"]
        rows.add(benchmark="serving", **workload, **row, times=times, machine=machine())
    fast = runs["cache_on"]
    for name, results in runs.items():
        if name == "cache_on":
            continue
        ratios = [b["seconds"] / a["seconds"] for a, b in zip(fast, results, strict=True)]
        same = sum(
            x == y
            for a, b in zip(fast, results, strict=True)
            for x, y in zip(a["tokens"], b["tokens"], strict=True)
        )
        rows.add(
            benchmark="serving",
            ratio=f"{name} / cache_on",
            times_slower=spread(ratios, 2),
            same_outputs=f"{same} of {args.requests * args.rounds}",
            machine=machine(),
        )


if __name__ == "__main__":
    main()
