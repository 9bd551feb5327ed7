"""Reads the configs that leave nothing open, without transformers.

To import transformers takes more than a second, a quarter of the time to the first token of a small
model. It is wanted for what a `config.json` does not say, and for what it refuses. Most of those
that one finds say all that is asked for here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

#: Sizes, all at least 1.
COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_DTYPES = ("float32", "float16", "bfloat16")
#: What would change the meaning of the rest.
_STRANGE = ("auto_map", "partial_rotary_factor", "text_config")


def plain_config(raw: dict[str, Any]) -> SimpleNamespace | None:
    """What transformers' config of a `config.json` has of what the engine reads.

    ``raw`` has one of the model types of ``SUPPORTED_ARCHITECTURES``. None where a value is left
    to transformers' defaults, is of another type than usual, or is one that asks for more than a
    look: scaled rotations, windows that differ from layer to layer.
    """
    sizes = {name: raw.get(name) for name in COUNTS}
    if any(type(size) is not int or size < 1 for size in sizes.values()):
        return None
    if any(name in raw for name in _STRANGE):
        return None
    head_dim = raw.get("head_dim")
    if raw["hidden_size"] % raw["num_attention_heads"]:
        return None
    if head_dim is None and raw.get("model_type") == "qwen3":  # whose own default it is
        return None
    if head_dim is not None and (type(head_dim) is not int or head_dim < 1):
        return None
    switches = {name: raw.get(name, False) for name in ("attention_bias", "mlp_bias")}
    tied, eps = raw.get("tie_word_embeddings"), raw.get("rms_norm_eps")
    if any(type(each) is not bool for each in (*switches.values(), tied)) or type(eps) is not float:
        return None
    if type(raw.get("hidden_act")) is not str:
        return None
    if "bos_token_id" not in raw or type(raw["bos_token_id"]) not in (int, type(None)):
        return None
    rope, dtype, windows = _rope(raw), _dtype(raw), _windows(raw)
    if rope is None or dtype is None or windows is None:
        return None
    return SimpleNamespace(
        **sizes,
        **switches,
        **windows,
        head_dim=head_dim,
        hidden_act=raw["hidden_act"],
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
        bos_token_id=raw["bos_token_id"],
        rope_parameters=rope,
        dtype=dtype,
    )


def _rope(raw: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters of a rotation that is not scaled, as of transformers 5 or as before it."""
    if raw.get("rope_scaling") is not None:
        return None
    parameters = raw.get("rope_parameters")
    if parameters is None:
        theta = raw.get("rope_theta")
    elif not isinstance(parameters, dict) or "rope_theta" in raw:
        return None
    else:
        theta = parameters.get("rope_theta")
        if parameters != {"rope_theta": theta, "rope_type": "default"}:
            return None
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        return None
    return {"rope_type": "default", "rope_theta": theta}


def _dtype(raw: dict[str, Any]) -> str | None:
    """The declared type, under its name of now or of before."""
    named = [raw[name] for name in ("dtype", "torch_dtype") if name in raw]
    return named[0] if len(named) == 1 and named[0] in _DTYPES else None


def _windows(raw: dict[str, Any]) -> dict[str, Any] | None:
    """``sliding_window`` and ``layer_types``."""
    kind, layers = raw.get("model_type"), raw["num_hidden_layers"]
    if kind == "mistral":
        window = raw.get("sliding_window", "left open")
        fits = window is None or (type(window) is int and window > 0)
        return {"sliding_window": window} if fits and "layer_types" not in raw else None
    full = ["full_attention"] * layers
    if raw.get("layer_types", full) != full:
        return None
    if kind in ("qwen2", "qwen3"):
        # Without the switch the window that stands beside it means nothing.
        fits = raw.get("use_sliding_window", False) is False
        return {"sliding_window": None, "layer_types": full} if fits else None
    fits = kind == "llama" and raw.get("sliding_window") is None
    return {"sliding_window": None} if fits else None
