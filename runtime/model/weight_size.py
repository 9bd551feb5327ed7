"""How much memory a model's weights will take, before they are loaded."""

from __future__ import annotations

import torch

from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.layers import Linear


def weight_bytes(
    config: ModelConfig,
    linear: type[Linear],
    dtype: torch.dtype,
    device: torch.device,
    embedding_dtype: torch.dtype,
) -> int:
    """Bytes that a decoder's matrices take, which are nearly all that its weights take."""
    queries = config.num_heads * config.head_dim
    qkv = queries + 2 * config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    numbers = config.num_layers * hidden * (qkv + queries)
    for layer in config.layers:
        experts = layer.experts
        widths = config.intermediate_size if experts is None else experts.count * experts.inner
        numbers += 3 * hidden * widths
    words = config.vocab_size * hidden
    head = linear.for_head()
    total = numbers * linear.stored_as(dtype)[0] / 8 + words * embedding_dtype.itemsize
    if not (config.tie_word_embeddings and head.shares_embedding):
        total += words * head.stored_as(dtype)[0] / 8
    return round(total)


def smaller_weights(quantization: str | None, device: torch.device) -> str:
    """What to do where the weights do not fit."""
    smaller = []
    if quantization is None:
        name = "int8" if device.type == "cpu" else "fp8"
        smaller.append(f", or quantization {name!r}, with a byte for a weight")
    if quantization in (None, "int8") and device.type == "cpu":
        smaller.append(", or quantization 'int4', with 5 bits")
    return "Take a smaller model" + "".join(smaller)
