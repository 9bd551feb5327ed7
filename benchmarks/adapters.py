"""What adapters of low rank cost: the steps of a batch of 32, with none, one and sixteen of them.

A Llama in the shape of SmolLM-135M with random weights; adapters of rank 16 on all of its
projections. The same 32 requests run in turn as the base model's, all with one adapter, and two
with each of sixteen adapters. `decode` is a step in which all 32 decode, `prefill` one in which
they compute 32 tokens of their prompts each. `cost` is the time beside the base model's, and
`sixteen_to_one` that of sixteen adapters beside one, as ratios of every round. Of the decoding
steps of a round the fastest counts, since others are disturbed by what else runs.

`--layers apart` runs the base model operation by operation as well, which a step with adapters does
in any case: so `cost` shows the adapters' own products alone.

    python -m benchmarks.adapters [--rounds N] [--layers apart] [--quantization int8] [--json FILE]
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.harness import Rows, machine, parser, spread
from coppice import Engine, EngineConfig, LoRARequest, SamplingParams
from coppice.runtime.model.adapters.projections import parts_of

BATCH, PROMPT, RANK, ADAPTERS = 32, 32, 16, 16
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_adapter(folder: Path, engine: Engine, seed: int) -> None:
    """An adapter of all projections, with small random numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in parts_of(engine.model_config).items():
        for side, shape in (("A", (RANK, part.inputs)), ("B", (part.outputs, RANK))):
            tensor = torch.empty(shape).normal_(0, 0.02, generator=generator)
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = tensor
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def steps(
    engine: Engine, adapters: list[LoRARequest | None], decodes: int, seed: int
) -> dict[str, float]:
    """The seconds of the step of prefill, and of the fastest one of decoding."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=decodes + 1, ignore_eos=True)
    for number in range(BATCH):
        prompt = [rng.randrange(3, 32_000) for _ in range(PROMPT)]
        adapter = adapters[number % len(adapters)]
        engine.add_request(str(number), prompt, params, lora_request=adapter)
    seconds = []
    while engine.has_unfinished():
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    engine.reset_cache()
    return {"prefill": seconds[0], "decode": min(seconds[1 : decodes + 1])}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7, metavar="N")
    options.add_argument("--layers", choices=("together", "apart"), default="together")
    options.add_argument("--quantization", default=None, metavar="NAME")
    asked = options.parse_args()
    rounds, decodes = (2, 3) if asked.quick else (asked.rounds, 12)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        engine = Engine(
            EngineConfig(
                model=str(folder), load_format="dummy", kv_cache_tokens=8192, max_num_seqs=BATCH,
                max_num_batched_tokens=BATCH * PROMPT, enable_lora=True, max_loras=ADAPTERS,
                quantization=asked.quantization, async_scheduling=False,
            )
        )  # fmt: skip
        if asked.layers == "apart":
            engine.runner.decoder.compiled = None
        known: list[LoRARequest | None] = []
        for number in range(ADAPTERS):
            write_adapter(folder / str(number), engine, number)
            known.append(LoRARequest(str(number), number + 1, str(folder / str(number))))
        sides: dict[str, list[LoRARequest | None]] = {
            "base": [None], "one": known[:1], "sixteen": known,
        }  # fmt: skip
        for side in sides.values():  # loads the adapters, and compiles what is compiled
            steps(engine, side, 1, 0)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(rounds):
            for name, side in sides.items():
                found[name].append(steps(engine, side, decodes, number))
    rows = Rows(asked.json)
    for phase in ("decode", "prefill"):
        times: dict[str, Any] = {
            name: [each[phase] for each in found[name]] for name in sides
        }  # fmt: skip
        ratio = {
            name: spread([a / b for a, b in zip(times[name], times["base"], strict=True)])
            for name in ("one", "sixteen")
        }
        rows.add(
            benchmark="adapters",
            phase=phase,
            batch=BATCH,
            rank=RANK,
            layers=asked.layers,
            quantization=asked.quantization,
            cost=ratio,
            sixteen_to_one=spread(
                [a / b for a, b in zip(times["sixteen"], times["one"], strict=True)]
            ),
            times={name: spread([1000 * each for each in times[name]]) for name in sides},
            machine=machine(),
        )


if __name__ == "__main__":
    main()
