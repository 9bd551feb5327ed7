"""The shapes that `gpu.py` runs: models as a `config.json`, and the sizes of its workloads.

Weights are random and made on the device (`load_format="dummy"`), so nothing large is stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

MODELS = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
}
#: A model whose KV of long contexts leaves room on one GPU.
FEW_LAYERS = "Llama-3.1-8B, 4 layers"
MODELS[FEW_LAYERS] = MODELS["Llama-3.1-8B"] | {"num_hidden_layers": 4}

#: With `--quick`, each model has these sizes instead, and the same parts.
_QUICK = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class Forked:
    """`requests` prompts of `prompt` tokens, each continued in `lines` lines by `out` tokens."""

    requests: int
    lines: int
    prompt: int
    out: int


@dataclass(frozen=True, slots=True)
class Shared:
    """`requests` prompts of `shared` + `own` tokens, `out` tokens each."""

    requests: int
    shared: int
    own: int
    out: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the workloads in `parts.py`.

    In turn, each number of `batches` of sequences decodes `steps` steps after `context` tokens.
    `prefills` prompts of `prefill` tokens are computed. The roofs copy `copied` bytes and multiply
    square matrices of `side` rows.
    """

    batches: tuple[int, ...]
    context: int
    steps: int
    prefills: int
    prefill: int
    system_prompt: Shared
    samples: Forked
    beams: Forked
    beside: Shared
    copied: int
    side: int
    max_num_seqs: int
    max_num_batched_tokens: int


REAL = Sizes(
    batches=(1, 32, 256),
    context=1024,
    steps=64,
    prefills=4,
    prefill=8192,
    system_prompt=Shared(256, 4096, 128, 256),
    samples=Forked(16, 16, 1024, 128),
    beams=Forked(8, 8, 4096, 64),
    beside=Shared(64, 512, 128, 64),
    copied=2 * 2**30,
    side=8192,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
)
QUICK = Sizes(
    batches=(1, 3),
    context=20,
    steps=4,
    prefills=2,
    prefill=48,
    system_prompt=Shared(4, 48, 5, 4),
    samples=Forked(2, 3, 20, 4),
    beams=Forked(2, 2, 20, 4),
    beside=Shared(3, 32, 8, 4),
    copied=2**20,
    side=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def write_model(name: str, folder: Path, *, quick: bool) -> Path:
    """The folder of this model's `config.json`, below `folder`; written if it does not exist."""
    made = folder / name
    if not made.exists():
        made.mkdir(parents=True)
        constants = {
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "bfloat16",
        }
        config = MODELS[name] | constants | (_QUICK if quick else {})
        (made / "config.json").write_text(json.dumps(config))
    return made
