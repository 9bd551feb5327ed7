"""The cost of experts on a CPU, beside a dense model with as many weights active for a token.

    python benchmarks/cpu/experts.py [--quantization int8] [--rounds 9]

Two random Qwen3 models of 8 layers: one of 32 experts, 384 wide, of which a token passes 4, and a
dense one, 1,536 wide. Their steps take turns in one process: decoding of 1 and 8 sequences, and a
prefill of 1,024 tokens. One JSON object a line: median microseconds of a step of both, the median
and the middle half of their ratios, and the ratio of the bytes of weights that their layers read,
where each row chooses its experts at random.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from coppice import Engine, EngineConfig, SamplingParams

HIDDEN, LAYERS, EXPERTS, CHOSEN, INNER = 512, 8, 32, 4, 384
VOCABULARY, PREFILL, DECODED = 8000, 1024, 24
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": CHOSEN * INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
MODELS: dict[str, dict[str, Any]] = {
    "experts": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
    },
    "dense": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}


def start(name: str, folder: Path, quantization: str | None) -> Engine:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(COMMON | MODELS[name]))
    return Engine(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            quantization=quantization,
            kv_cache_tokens=8192,
            max_num_seqs=8,
            max_num_batched_tokens=PREFILL,
            enable_prefix_caching=False,
        )
    )


def seconds(engine: Engine, sequences: int, rng: random.Random) -> float:
    """Of a prefill with 0 sequences, else the median of a decoding step of so many."""
    length = 64 if sequences else PREFILL
    params = SamplingParams(temperature=0, max_tokens=DECODED if sequences else 1, ignore_eos=True)
    for number in range(max(sequences, 1)):
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
        engine.add_request(str(number), prompt, params)
    times = []
    while engine.has_unfinished():
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:-1]) if sequences else times[0]


def bytes_ratio(rows: int) -> float:
    """Weights of layers that a step reads, experts over dense, if each expert is read once."""
    attention = HIDDEN * 64 * (2 * 8 + 2 * 2)
    read = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows)
    experts = attention + HIDDEN * EXPERTS + read * 3 * HIDDEN * INNER
    return experts / (attention + 3 * HIDDEN * CHOSEN * INNER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: start(name, Path(folder) / name, arguments.quantization) for name in MODELS
        }
        for sequences in (1, 8, 0):
            taken: dict[str, list[float]] = {name: [] for name in MODELS}
            for turn in range(arguments.rounds + 1):
                for name, engine in engines.items():
                    found = seconds(engine, sequences, random.Random(turn))
                    if turn:
                        taken[name].append(found)
            ratios = [a / b for a, b in zip(taken["experts"], taken["dense"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row = {
                "benchmark": "experts",
                "work": f"decode of {sequences}" if sequences else f"prefill of {PREFILL}",
                "weights": arguments.quantization or "float32",
                "experts_us": round(1e6 * statistics.median(taken["experts"])),
                "dense_us": round(1e6 * statistics.median(taken["dense"])),
                "ratio": round(middle, 2),
                "ratio_quartiles": [round(low, 2), round(high, 2)],
                "bytes_ratio": round(bytes_ratio(sequences or PREFILL), 2),
                "threads": torch.get_num_threads(),
                "machine": platform.machine(),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
