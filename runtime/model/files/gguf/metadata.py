"""What a GGUF file says of its model and transformers' reading of it leaves out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
# Fields that transformers' table lacks for some architectures: (key, field, architectures).
_MORE = (
    ("attention.key_length", "head_dim", None),
    ("attention.sliding_window", "sliding_window", ("phi3", "mistral")),
    ("expert_feed_forward_length", "moe_intermediate_size", ("qwen3moe",)),
)
# Layers of the models whose queries are scaled by their width (llama.cpp's LLM_TYPE_27B).
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def fields(readers: list[Any]) -> dict[str, Any]:
    """The metadata of the first of the files of a model, by name."""
    return {name: field.contents() for name, field in readers[0].fields.items()}


def completed(raw: Mapping[str, Any], readers: list[Any], file: Path) -> dict[str, Any]:
    """The `config.json` that transformers makes of a file, with what it leaves out.

    Raises ValueError, naming the file, for a rotation that no `config.json` describes.
    """
    found = fields(readers)
    architecture = found["general.architecture"]
    tensors = {each.name: each for reader in readers for each in reader.tensors}
    config = dict(raw)
    for key, field, owners in _MORE:
        value = found.get(f"{architecture}.{key}")
        if isinstance(value, int) and (owners is None or architecture in owners):
            config[field] = value
    if "token_embd.weight" in tensors:
        config["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if config["num_hidden_layers"] == _SCALED_BY_WIDTH.get(architecture):
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    kinds = {each.tensor_type.name for each in tensors.values() if len(each.shape) > 1}
    config["dtype"] = "float32" if kinds == {"F32"} else "float16" if "F16" in kinds else "bfloat16"
    config["eos_token_id"] = list(
        dict.fromkeys(
            found[f"tokenizer.ggml.{name}"] for name in _ENDS if f"tokenizer.ggml.{name}" in found
        )
    )
    config.pop("architectures", None)
    config.pop("torch_dtype", None)
    _set_rotation(config, found, tensors, architecture, file)
    return config


def _set_rotation(
    config: dict[str, Any],
    found: Mapping[str, Any],
    tensors: Mapping[str, Any],
    architecture: str,
    file: Path,
) -> None:
    """Sets how positions are rotated, where it is not the plain way."""
    theta = float(found.get(f"{architecture}.rope.freq_base", 10000.0))
    width = int(found.get(f"{architecture}.rope.dimension_count", config.get("head_dim") or 0))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if architecture == "phi3" and width and width != head:
        config["partial_rotary_factor"] = width / head
    scaling = {
        name: found.get(f"{architecture}.rope.scaling.{name}")
        for name in ("type", "factor", "original_context_length", "attn_factor")
    }
    length = scaling["original_context_length"]
    rope: dict[str, Any] | None = None
    if "rope_factors_short.weight" in tensors:
        rope = {
            "rope_type": "longrope",
            "short_factor": _numbers(tensors["rope_factors_short.weight"]),
            "long_factor": _numbers(tensors["rope_factors_long.weight"]),
            "original_max_position_embeddings": length,
        }
        config["original_max_position_embeddings"] = length
        if scaling["attn_factor"]:
            rope["attention_factor"] = float(scaling["attn_factor"])
    elif "rope_freqs.weight" in tensors:
        rope = _llama3(_numbers(tensors["rope_freqs.weight"]), theta, head, file)
    elif scaling["type"] in ("linear", "yarn"):
        rope = {"rope_type": scaling["type"], "factor": float(scaling["factor"] or 1.0)}
        if scaling["type"] == "yarn":
            rope["original_max_position_embeddings"] = length
    elif scaling["type"] not in (None, "none"):
        raise ValueError(
            f"{file}: rope.scaling.type is {scaling['type']!r}; it must be linear, yarn or longrope"
        )
    if rope is None:
        return
    rope["rope_theta"] = theta
    if architecture == "gemma3":
        by_kind = dict(config.get("rope_parameters") or {})
        config["rope_parameters"] = by_kind | {"full_attention": rope}
    else:
        if "partial_rotary_factor" in config:
            rope["partial_rotary_factor"] = config["partial_rotary_factor"]
        config["rope_parameters"] = rope


def _llama3(factors: list[float], theta: float, head: int, file: Path) -> dict[str, Any]:
    """The parameters of Llama 3.1's rotation, of which a file holds only the results."""
    rope = {
        "rope_type": "llama3",
        "factor": max(factors),
        "original_max_position_embeddings": _LLAMA3_LENGTH,
        **_LLAMA3,
    }
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    for index, given in enumerate(factors):
        length = 2 * math.pi * theta ** (2 * index / head)
        smooth = min(1.0, max(0.0, (_LLAMA3_LENGTH / length - low) / (high - low)))
        expected = 1 / ((1 - smooth) / rope["factor"] + smooth)
        if abs(given - expected) > 1e-3 * expected:
            raise ValueError(
                f"{file}: rope_freqs.weight has factor {given:g} at {index}; the rotation of "
                f"Llama 3.1 would have {expected:g}, and others are not read from a GGUF file"
            )
    return rope


def _numbers(tensor: Any) -> list[float]:
    return [float(each) for each in np.asarray(tensor.data, np.float32).reshape(-1)]
