"""Inter-token latency on the real engine while a long prompt is prefilled among short chats.

    python benchmarks/latency.py [--quick] [--json FILE] [--rounds N]

16 chats of 64 tokens decode; when each has its first 100 tokens, a prompt of 16,384 tokens arrives,
and the chats go on until it has its first token and 100 tokens longer. Random weights in the shape
of a small Llama. Each round runs both sides in turn: without a limit on what a step may prefill
beside decodes, and with the server's `max_step_stretch`. All gaps between two tokens of a chat
count. A row has the spread over the rounds of

    itl_p99_over_p50        of all gaps
    itl_p99_over_undisturbed    p99 of all gaps, over the median gap before the long prompt came
    ttft_over_unlimited     time to first token of the long prompt, over that of the other side
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Rows, machine, parser, spread

from coppice import Engine, EngineConfig, SamplingParams
from coppice.frontend.engine_options import SERVER_DEFAULTS

_CHATS = 16
_ALONE = 100  # tokens of each chat before the long prompt comes, and after its first token
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8_000,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_engine(directory: Path, hidden: int, length: int, stretch: float | None) -> Engine:
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    (directory / "config.json").write_text(json.dumps(_LLAMA | shape))
    options = SERVER_DEFAULTS | {"max_step_stretch": stretch}
    return Engine(
        EngineConfig(
            model=str(directory),
            load_format="dummy",
            dtype="float32",
            kv_cache_tokens=2 * length + _CHATS * 16_384,
            max_model_len=length + 1024,
            **options,
        )
    )


def disturbed_chats(engine: Engine, length: int, seed: int) -> dict[str, float]:
    """Serves the chats and the long prompt; what the gaps and its first token came to."""
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
            came = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
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
    args = options.parse_args()
    rounds = args.rounds or (1 if args.quick else 5)
    length, hidden = (2_048, 128) if args.quick else (16_384, 256)
    stretch = SERVER_DEFAULTS["max_step_stretch"]
    rows = Rows(args.json)
    found: dict[float | None, list[dict[str, float]]] = {None: [], stretch: []}
    with tempfile.TemporaryDirectory() as directory:
        sides = {limit: make_engine(Path(directory), hidden, length, limit) for limit in found}
        for round_ in range(-1, rounds):
            for limit, engine in sides.items():
                # Round -1 compiles the kernels and takes the memory.
                row = disturbed_chats(engine, length if round_ >= 0 else 1024, round_ + 1)
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
            max_step_stretch=limit, **measured, machine=machine(),
        )  # fmt: skip


if __name__ == "__main__":
    main()
