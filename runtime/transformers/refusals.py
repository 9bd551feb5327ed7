"""What of transformers' models cannot run on pages, found in configs, modules and calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from coppice.runtime.transformers.attention import LayerFacts

_KINDS = ("full_attention", "sliding_attention")
_SENSES = ("vision", "image", "video", "audio", "speech", "vq", "codec")


class Refused(ValueError):
    """transformers' model cannot run on pages; the message is the reason, without the model."""


def check_config(config: PreTrainedConfig) -> None:
    """Refuses encoders, and models that also read pictures or sound."""
    parts = [name for name in config.sub_configs if getattr(config, name, None) is not None]
    for name in parts:
        if name.startswith(_SENSES):
            raise Refused(f"it reads pictures or sound ({name} in config.json)")
    if "text_config" in parts:
        raise Refused("it is no model for text alone (text_config in config.json)")
    if getattr(config, "is_encoder_decoder", False):
        raise Refused("it has an encoder (is_encoder_decoder in config.json)")


def check_parts(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Refuses layers that keep a state beside keys and values."""
    other = sorted(set(getattr(config, "layer_types", None) or ()) - set(_KINDS))
    if other:
        raise Refused(
            f"it has layers of kind {', '.join(other)}; layers run that attend to all earlier "
            "tokens or to a window of them, and keep keys and values alone"
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise Refused(
            "it scales queries by their positions, and its class counts positions from the start "
            "of a step (attn_temperature_tuning in config.json)"
        )
    if model._is_stateful:
        raise Refused(
            "it has layers with a state of their own (state-space or linear attention), which "
            "pages of keys and values do not hold"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            raise Refused(f"it mixes neighbouring tokens by a convolution ({name})")


def check_layers(config: PreTrainedConfig, layers: Sequence[LayerFacts]) -> None:
    """Refuses calls of attention that pages of one size cannot serve, or that are too few."""
    count = getattr(config, "num_hidden_layers", None) or len(layers)
    if not layers or len(layers) % count:
        raise Refused(
            f"{len(layers)} calls of attention went through transformers' interface in a pass of "
            f"{count} layers: the others are of another kind, or have attention of their own"
        )
    shapes = sorted({(each.num_heads, each.num_kv_heads) for each in layers})
    if len(shapes) > 1:
        pairs = ", ".join(f"{heads} and {kv_heads}" for heads, kv_heads in shapes)
        raise Refused(f"its layers differ in heads and KV heads ({pairs})")
    heads, kv_heads = shapes[0]
    if heads % kv_heads:
        raise Refused(f"it has {heads} heads, which is no multiple of its {kv_heads} KV heads")
