"""Each family reads a `config.json` as transformers does, or refuses it and names the field."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.families.registry import FAMILIES
from coppice.runtime.model.rope import attention_factor, frequencies

COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}
# Of each family, in the ways in which they are found: of transformers 5, and of before.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 16,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    },
    "old llama": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "rope_theta": 10000,
        "torch_dtype": "float16",
        "transformers_version": "4.37.2",
    },
    "old qwen2": {
        **COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_window_layers": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 64,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    },
    "qwen3": {
        **COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": None,
        "dtype": "float32",
        "head_dim": 32,
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "mistral": {
        **COMMON,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rope_theta": 1000000.0,
        "sliding_window": 256,
        "torch_dtype": "bfloat16",
    },
}
CONFIGS |= {
    "gemma2": {
        **COMMON,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rope_theta": 10000.0,
        "sliding_window": 64,
        "torch_dtype": "bfloat16",
    },
    "gemma3": {
        **COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 64,
        "dtype": "bfloat16",
    },
    "old gemma3": {
        **COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 64,
        "sliding_window_pattern": 2,
    },
    "phi3": {
        **COMMON,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": 512,
        "partial_rotary_factor": 0.75,
        "rope_theta": 10000.0,
        "sliding_window": None,
    },
    "olmo2": {
        **COMMON,
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "rope_theta": 500000,
    },
    "olmo3": {
        **COMMON,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_theta": 500000,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": {
        **COMMON,
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": 0.0625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "rope_theta": 10000.0,
    },
    "smollm3": {
        **COMMON,
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 1, 0],
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
    },
    "mixtral": {
        **COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "gpt_oss": {
        **COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        "sliding_window": 64,
    },
    "qwen3_moe": {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "glm4": {
        **COMMON,
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": True,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
    },
}
ABSENT = object()
ODD: list[Any] = [
    ABSENT, None, True, False, 0, 1, 3, -1, 1.5, "x", "gelu", "16", [], {}, "bfloat16", "float64",
]  # fmt: skip
MORE: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                         "original_max_position_embeddings": 128}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default"}},
    {"partial_rotary_factor": 0.5},
    {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"sliding_window": 32},
    {"rope_theta": 5000.0},
    {"dtype": "float16"},
    {"torch_dtype": "float16"},
    {"hidden_size": 66},
    {"head_dim": 17},
]  # fmt: skip


# transformers checks their types; the models do not read them (a window without its switch).
NOT_READ = {"bos_token_id", "pretraining_tp", "max_window_layers", "sliding_window"}
# It refuses these, which can mean one thing only.
TAKEN_AS_MEANT: list[dict[str, Any]] = [
    {"rms_norm_eps": 1},
    {"rms_norm_eps": 3},
    {"head_dim": None},
    {"num_key_value_heads": None},
    {"rope_scaling": False},
]


def read(folder: Path, raw: dict[str, Any]) -> ModelConfig | str:
    """What we read; the message of the error where we refuse."""
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        return load_model_config(folder)
    except ValueError as error:
        return str(error)


def read_by_transformers(folder: Path) -> dict[str, Any] | None:
    """The same values from transformers' config, None where it or its model refuses."""
    try:
        return values_by_transformers(folder)
    except Exception:  # each of its many types means a bad file
        return None


def values_by_transformers(folder: Path) -> dict[str, Any] | None:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = [None]
    if config.model_type in ("gemma3_text", "olmo3"):
        kinds = ["full_attention", "sliding_attention"]
    rotations = [rotation(config, head_dim, kind) for kind in kinds]
    if config.model_type == "smollm3":
        rotations.append(((0.0,) * (head_dim // 2), 1.0))
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("olmo2", "granite", "glm4"):
        window = None  # their models do not read it
    windows = [window] * layers
    plain = ("llama", "mistral", "phi3", "olmo2", "granite", "glm4", "mixtral", "qwen3_moe")
    if config.model_type not in plain:
        # The others' models do not read the kinds of layers.
        kinds = zip(config.layer_types, windows, strict=True)
        windows = [each if kind == "sliding_attention" else None for kind, each in kinds]
    mixtures = getattr(config, "num_local_experts", None)
    experts = None
    if mixtures is not None:
        inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
        kept = getattr(config, "norm_topk_prob", True)
        experts = (mixtures, config.num_experts_per_tok, inner, kept)
        if config.num_experts_per_tok > mixtures:
            return None  # its model fails in the first step
    return {
        "experts": experts,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype or torch.float32,
        "sliding_windows": tuple(windows),
        "rotations": rotations,
    }


def rotation(config: Any, head_dim: int, kind: str | None) -> tuple[tuple[float, ...], float]:
    """Frequencies of half a head, 0 where it is not rotated, and the factor."""
    rope = dict(config.rope_parameters if kind is None else config.rope_parameters[kind])
    width, factor = int(head_dim * rope.get("partial_rotary_factor", 1.0)), 1.0
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        frequencies = 1.0 / rope["rope_theta"] ** exponents
    else:
        more = {} if kind is None else {"layer_type": kind}
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **more)
    still = (0.0,) * ((head_dim - width) // 2)
    return (*frequencies.tolist(), *still), factor


def values_of(config: ModelConfig) -> dict[str, Any]:
    names = "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim"
    names += " rms_norm_eps tie_word_embeddings torch_dtype sliding_windows"
    chosen = [layer.experts for layer in config.layers if layer.experts is not None]
    return {
        "experts": astuple(chosen[0])[:4] if chosen else None,
        **{name: getattr(config, name) for name in names.split()},
        "rotations": [(frequencies(rope), attention_factor(rope)) for rope in config.ropes],
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(
    model_type: str, tmp_path: Path
) -> None:
    found = read(tmp_path, {"model_type": model_type})
    assert isinstance(found, ModelConfig), found
    assert values_of(found) == read_by_transformers(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_change_of_a_config_means_what_it_does_to_transformers(
    name: str, tmp_path: Path
) -> None:
    raw = CONFIGS[name]
    changes: list[dict[str, Any]] = [{}, *MORE]
    for key in raw:
        if key not in ("architectures", "model_type"):  # these choose the family
            changes += [{key: value} for value in ODD]
    accepted = 0
    for change in changes:
        changed = {k: v for k, v in (raw | change).items() if v is not ABSENT}
        found = read(tmp_path, changed)
        theirs = read_by_transformers(tmp_path)
        if isinstance(found, str):
            named = [key.removeprefix("torch_") for key in change]
            named += [key for value in change.values() if isinstance(value, dict) for key in value]
            assert any(key in found for key in named), (change, found)
        elif theirs is not None:
            accepted += 1
            assert values_of(found) == theirs, change
        else:
            assert set(change) <= NOT_READ or change in TAKEN_AS_MEANT, change
    assert accepted >= 30


def test_the_engine_is_there_without_transformers(demo_folder: Path) -> None:
    script = (
        "import sys; from coppice import Engine, EngineConfig; "
        f"Engine(EngineConfig(model={str(demo_folder)!r}, kv_cache_tokens=64)); "
        "sys.exit('transformers' in sys.modules or 'huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script], check=False).returncode == 0


@pytest.fixture
def demo_folder() -> Path:
    import coppice.frontend

    return Path(coppice.frontend.__path__[0]) / "demo" / "model"
