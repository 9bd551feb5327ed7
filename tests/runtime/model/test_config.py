"""What `load_model_config` reads from a folder, and what it refuses by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.runtime.model.config import LayerSpec
from coppice.runtime.model.config_file import load_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_reads_the_shape(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, LLAMA | {"torch_dtype": "bfloat16"}))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (100, 32, 48)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert config.head_dim == 8  # derived
    assert config.rms_norm_eps == 1e-5
    assert config.max_position == 256
    assert config.torch_dtype == torch.bfloat16
    assert config.sliding_windows == (None, None, None)
    assert not config.tie_word_embeddings


def test_families_differ_in_biases_and_norms(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    config = load_model_config(tiny_checkpoint(family))
    expected = LayerSpec(qkv_bias=family == "qwen2", qk_norm="head" if family == "qwen3" else None)
    assert config.layers == (expected, expected)
    assert config.head_dim == 16
    assert config.eos_token_ids == (2,)
    assert config.torch_dtype == torch.float32


def test_biases_by_switch(tmp_path: Path) -> None:
    switches = {"attention_bias": True, "mlp_bias": True}
    llama = load_model_config(write(tmp_path, LLAMA | switches))
    assert set(llama.layers) == {LayerSpec(qkv_bias=True, output_bias=True, mlp_bias=True)}


def test_a_config_without_architectures_is_read_by_its_type(tmp_path: Path) -> None:
    raw = {key: value for key, value in QWEN2.items() if key != "architectures"}
    assert load_model_config(write(tmp_path, raw)).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (7, {"eos_token_id": [9, 7]}, (9, 7)),
        (7, {"eos_token_id": 9}, (9, 7)),
        (7, {"temperature": 0.5}, (7,)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_ids(
    tmp_path: Path, config: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    folder = write(tmp_path, LLAMA | {"eos_token_id": config}, generation)
    assert load_model_config(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (MISTRAL | {"sliding_window": 16}, (16, 16, 16)),
        (MISTRAL | {"sliding_window": None}, (None, None, None)),
        (QWEN2 | {"sliding_window": 16}, (None, None, None)),
        (
            QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 16),
        ),
        (
            QWEN3 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
            (16, 16, 16),
        ),
        (
            QWEN3
            | {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (16, None, 16),
        ),
    ],
)
def test_sliding_windows(
    tmp_path: Path, raw: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert load_model_config(write(tmp_path, raw)).sliding_windows == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 256),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e4}, 1024),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 1024),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 256,
                }
            },
            512,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 128,
                }
            },
            256,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            256,
        ),
    ],
)
def test_longest_sequence(tmp_path: Path, rope: dict[str, Any], expected: int) -> None:
    assert load_model_config(write(tmp_path, LLAMA | rope)).max_position == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"is_causal": False}, "is_causal"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"}, "FalconForCausalLM"),
        ({"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}, "Starcoder2"),
        ({"architectures": ["NoSuchModel"], "model_type": "no_such"}, "NoSuchModel"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}, "qwen2"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"architectures": None, "model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4"),
        ({"head_dim": 7}, "head_dim"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "mystery", "factor": 2.0}}, "mystery"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method .bitsandbytes"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4.*gpt-oss alone"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"sliding_window": 16}, "sliding_window"),
    ],
)
def test_refuses_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    folder = write(tmp_path, LLAMA | changes)
    with pytest.raises(ValueError, match=named):
        load_model_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 2},
        {"layer_types": ["chunked_attention"] * 3},
    ],
)
def test_refuses_layer_types_that_it_cannot_follow(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"layer_types|num_hidden_layers"):
        load_model_config(write(tmp_path, QWEN3 | changes))


def test_refuses_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_refuses_a_broken_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_config_is_read_without_torch(tmp_path: Path) -> None:
    """Importing torch takes seconds; `coppice plan` reads the config alone."""
    write(tmp_path, LLAMA)
    script = (
        "import sys; from pathlib import Path; "
        "from coppice.runtime.model.config_file import load_model_config; "
        f"load_model_config(Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script], check=False).returncode == 0
