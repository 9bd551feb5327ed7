"""Configs read without transformers are what transformers makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coppice.runtime.model import config as model_config
from coppice.runtime.model.config import ModelConfig, load_model_config
from coppice.runtime.model.fast_config import plain_config

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
# What these models do not read (a window, where no switch is set): transformers checks its type.
UNREAD = {
    "llama": (),
    "old llama": ("pretraining_tp", "transformers_version"),
    "old qwen2": ("max_window_layers", "sliding_window"),
    "qwen3": ("sliding_window",),
    "mistral": (),
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


def outcome(folder: Path, raw: dict[str, Any]) -> ModelConfig | type:
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        return load_model_config(folder)
    except ValueError as error:
        return type(error)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_today_are_plain(name: str) -> None:
    assert plain_config(CONFIGS[name]) is not None


@pytest.mark.parametrize("name", CONFIGS)
def test_every_change_of_a_config_means_what_it_does_to_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = CONFIGS[name]
    changed = [{**raw, **more} for more in MORE]
    for key in raw:
        if key in ("architectures", "model_type", *UNREAD[name]):  # the two are read before
            continue
        for value in ODD:
            each = {**raw, key: value}
            if value is ABSENT:
                del each[key]
            changed.append(each)
    plain = [outcome(tmp_path, each) for each in (raw, *changed)]
    counted = sum(plain_config(each) is not None for each in changed)
    assert counted >= 10, "some of the changes leave it plain"
    monkeypatch.setattr(model_config, "plain_config", lambda raw: None)
    for each, found in zip((raw, *changed), plain, strict=True):
        assert found == outcome(tmp_path, each), {
            key: each.get(key, "absent") for key in raw | each if raw.get(key) != each.get(key)
        }


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
