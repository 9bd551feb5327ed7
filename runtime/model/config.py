"""What the engine needs to know of a model: read from its `config.json`, refused if unsupported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coppice.runtime.model.fast_config import COUNTS, plain_config
from coppice.runtime.model.rope import RopeConfig, read_rope_config
from coppice.runtime.startup.light_transformers import leave_out_models

#: Architectures by the `model_type` that stands for them where a config names no architecture.
SUPPORTED_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer of the Llama kind.

    ``attention_bias``, ``output_bias`` and ``mlp_bias`` say whether the query-key-value, the
    attention's output and the feed-forward projections have biases. ``qk_norm``: queries and keys
    are normalised head by head. ``sliding_windows`` has one entry a layer, the tokens that a token
    sees with itself included, or None for all. ``max_position`` is the longest sequence in tokens.
    ``torch_dtype`` is the type that the config declares for the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: torch.dtype


def load_model_config(path: Path) -> ModelConfig:
    """Read ``path/config.json`` and, for end-of-sequence ids, ``path/generation_config.json``.

    Raises ``ValueError``, naming what is in the file and what is allowed, for a missing or broken
    file and for anything that the decoder would compute differently from transformers:
    architectures other than those of ``SUPPORTED_ARCHITECTURES``, activations other than SiLU,
    unsupported RoPE variants, and checkpoints that are stored quantized.
    """
    raw = _read_json(path / "config.json")
    architecture = _architecture(raw)
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"quantization_config in {path / 'config.json'} has quant_method {method!r}; "
            "checkpoints that are stored quantized are not supported: give an unquantized one"
        )
    hf = plain_config(raw) or _transformers_config(path)
    for name in COUNTS:
        if getattr(hf, name) < 1:
            raise ValueError(f"{name} is {getattr(hf, name)}; it must be at least 1")
    if hf.hidden_act != "silu":
        raise ValueError(f"hidden_act is {hf.hidden_act!r}; supported is 'silu'")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; it must be even")
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads is {hf.num_attention_heads}; it must be a multiple of "
            f"num_key_value_heads, {hf.num_key_value_heads}"
        )
    # Llama and Qwen3 have one switch for all four attention projections, Qwen2 always has biases on
    # the first three, Mistral never has any. Only Llama has the switch for the feed-forward part.
    attention_bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=hf.rms_norm_eps,
        rope=read_rope_config(hf),
        max_position=_max_position(hf),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        attention_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(hf, architecture),
        eos_token_ids=_eos_token_ids(path, raw),
        bos_token_id=hf.bos_token_id,
        torch_dtype=_declared_dtype(hf),
    )


def _transformers_config(path: Path) -> Any:
    leave_out_models()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many types, and each one means a bad file
        raise ValueError(f"{path / 'config.json'} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; a model's folder must hold it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must be a JSON object")
    return content


def _architecture(raw: dict[str, Any]) -> str:
    allowed = ", ".join(SUPPORTED_ARCHITECTURES.values())
    model_type = raw.get("model_type")
    named = raw.get("architectures") or []
    expected = SUPPORTED_ARCHITECTURES.get(str(model_type))
    if named:
        if len(named) != 1 or named[0] not in SUPPORTED_ARCHITECTURES.values():
            raise ValueError(f"architectures is {named}; supported are {allowed}")
        if named[0] != expected:
            raise ValueError(f"model_type is {model_type!r}, which does not go with {named[0]}")
    if expected is None:
        raise ValueError(
            f"model_type is {model_type!r} and architectures is missing; supported are {allowed}"
        )
    return expected


def _max_position(hf: Any) -> int:
    """Longest sequence, scaling counted: configs give the length before or after it."""
    parameters = hf.rope_parameters
    rope_type, factor = parameters.get("rope_type"), parameters.get("factor")
    if rope_type == "linear":
        return int(hf.max_position_embeddings * factor)
    if rope_type == "yarn" and factor is not None:
        scaled = int(parameters["original_max_position_embeddings"] * factor)
        return max(hf.max_position_embeddings, scaled)
    return int(hf.max_position_embeddings)


def _sliding_windows(hf: Any, architecture: str) -> tuple[int | None, ...]:
    """The window of each layer, as transformers' models of that architecture apply it."""
    window = getattr(hf, "sliding_window", None)
    if architecture == "MistralForCausalLM":
        windows: tuple[int | None, ...] = (window,) * hf.num_hidden_layers
    elif architecture == "LlamaForCausalLM":
        # Its model never reads a window, so a config that asks for one asks for something else.
        if window is not None:
            raise ValueError(f"sliding_window is {window}; LlamaForCausalLM supports none")
        windows = (None,) * hf.num_hidden_layers
    else:
        # transformers has already turned use_sliding_window and max_window_layers into these.
        kinds = {"full_attention": None, "sliding_attention": window}
        unknown = sorted(set(hf.layer_types) - set(kinds))
        if unknown or len(hf.layer_types) != hf.num_hidden_layers:
            raise ValueError(
                f"layer_types is {hf.layer_types}; it must have {hf.num_hidden_layers} entries, "
                f"each one of {', '.join(kinds)}"
            )
        if window is None and "sliding_attention" in hf.layer_types:
            raise ValueError(
                "layer_types asks for sliding_attention, but sliding_window is not set "
                "(or use_sliding_window is false)"
            )
        windows = tuple(kinds[kind] for kind in hf.layer_types)
    if any(w is not None and w < 1 for w in windows):
        raise ValueError(f"sliding_window is {window}; it must be at least 1")
    return windows


def _eos_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """All ids that either file names, those of the generation config first.

    The two differ in practice, most often because one of them forgot the end of a chat turn, and
    an answer that stops at either is what a user expects.
    """
    generation = path / "generation_config.json"
    sources = [(generation, _read_json(generation))] if generation.exists() else []
    sources.append((path / "config.json", raw))
    found: dict[int, None] = {}
    for source, content in sources:
        value = content.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ValueError(
                    f"eos_token_id in {source} is {value!r}; it must be a token id or a list"
                )
            found[token_id] = None
    return tuple(found)


def _declared_dtype(hf: Any) -> torch.dtype:
    dtype = hf.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype is None:
        return torch.float32
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}; supported are float32, float16, bfloat16")
    return dtype
